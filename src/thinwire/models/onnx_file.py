"""A program as an ONNX file, for runtimes that are not torch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch

from thinwire.errors import ConfigError
from thinwire.models.program import ROWS, Program

PACKAGES = ("onnx", "onnxscript")
OUTPUT = "output"
LARGEST_BYTES = 1 << 30
"""Of a file that holds its weights; protobuf has a limit of 2 GiB, and larger ones get a file beside it."""


def write_onnx(program: Program, names: Sequence[str], path: str) -> None:
    """Writes a program with its weights.

    Args:
        program: the network.
        names: of its inputs; each has a first dimension of any number of rows.
        path: of the file.

    Raises:
        ConfigError: A package is missing, or torch's exporter does not take the network.
    """
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"an ONNX file needs the packages {' and '.join(PACKAGES)}, of which {' and '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not installed: pip install 'thinwire[onnx]'"
        )
    program = program.cpu().eval()
    weights = sum(value.numel() * value.element_size() for value in program.state_dict().values())
    forms = (tuple({0: torch.export.Dim("rows", min=2, max=1 << 40)} for _ in names),)
    with _silence():
        try:
            torch.onnx.export(
                program,
                program.examples(ROWS),
                path,
                dynamo=True,
                dynamic_shapes=forms,
                input_names=list(names),
                output_names=[OUTPUT],
                external_data=weights > LARGEST_BYTES,
                verbose=False,
            )
        except Exception as error:  # of torch's exporter, which has a class for each of its stages
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"torch {torch.__version__} cannot write this network as ONNX: {line[:300]}. Another version of torch "
                "or onnxscript may; the saved model itself can be loaded without its code"
            ) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What the exporter tells of its own stages is neither printed nor warned of."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
