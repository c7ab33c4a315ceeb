"""Stores one tree in one safetensors file: the tensors as such, and the structure as JSON in the metadata.

This module neither unpickles nor calls anything that a file names: a hostile file can at worst give wrong numbers.
"""

from __future__ import annotations

import json
import reprlib

import safetensors
import safetensors.torch
import torch

from thinwire.checkpoint.structure import damaged, flatten, parse, restore
from thinwire.errors import CheckpointError

FORMAT_VERSION = 1
NEEDS = "0.1.0"
"""The first thinwire that reads `FORMAT_VERSION`; written into files, so that an older thinwire can name it."""

_METADATA_KEY = "thinwire"  # a single key: safetensors writes several in random order, and digests would differ
_MAX_HEADER_BYTES = 100_000_000  # the longest header that safetensors reads


class NewerFormatError(CheckpointError):
    """The data are whole, but a newer thinwire wrote them."""


def encode(tree: object) -> bytes:
    """The tree as a safetensors file; equal trees give equal bytes.

    A tree is any nesting of dict (str or int keys), list, tuple, None, bool, int, float, str, bytes,
    `torch.Tensor`, `numpy.ndarray` and NumPy scalars. `decode` returns a tree that is equal to the last bit, with these
    differences: tensors are on the CPU, contiguous, without gradient, and never share memory; a NamedTuple becomes a
    tuple; objects of other subclasses (OrderedDict, IntEnum, Parameter) become their plain base, except Counter.

    Raises:
        CheckpointError: The tree has a value of another type; the message gives its path.

    >>> decode(encode({"state": {0: (None, 1.5)}}))
    {'state': {0: (None, 1.5)}}
    """
    structure, tensors = flatten(tree)
    text = json.dumps({"version": FORMAT_VERSION, "needs": NEEDS, "tree": structure}, separators=(",", ":"))
    try:
        data: bytes = safetensors.torch.save(_apart(tensors), {_METADATA_KEY: text})
    except (safetensors.SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"safetensors {safetensors.__version__} could not write the tree ({error!r}). It holds dense "
            "tensors of the common types. Update safetensors, or convert the tensors to float32."
        ) from error
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the tree's structure takes {header_bytes:,} bytes. All but its tensors, arrays and bytes must "
            f"fit in {_MAX_HEADER_BYTES:,}. Store long lists of numbers as tensors."
        )
    return data


def decode(data: bytes) -> object:
    """The tree from which `encode` made the data.

    Raises:
        CheckpointError: The data are damaged, or from a newer thinwire.
    """
    structure = _structure(data)
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (
        safetensors.SafetensorError,
        AssertionError,
        LookupError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise damaged(f"safetensors cannot read them ({error})") from error
    return restore(structure, tensors)


def check_version(value: object, known: int, needs: object) -> None:
    """Raises an error that names the thinwire to install, where this one does not know the version."""
    if type(value) is not int or value < 1:
        raise damaged(f"its version is {reprlib.repr(value)}")
    if value > known:
        wanted = f"thinwire {needs[:40]} or newer" if isinstance(needs, str) else "a newer thinwire"
        raise NewerFormatError(
            f"the checkpoint is of format version {value}. This thinwire reads versions 1 to {known}. Install {wanted}."
        )


def _structure(data: bytes) -> object:
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise damaged(f"{len(data):,} bytes are not a whole safetensors file")
    header = parse(bytes(data[8 : 8 + header_bytes]), what="the safetensors header")
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(_METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise damaged(f"the safetensors metadata have no {_METADATA_KEY!r}")
    content = parse(text, what="the tree's structure")
    if not isinstance(content, dict):
        raise damaged("the tree's structure is not a JSON object")
    check_version(content.get("version"), FORMAT_VERSION, content.get("needs"))
    if "tree" not in content:
        raise damaged("the tree's structure is missing")
    return content["tree"]


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, copied where two share memory: safetensors refuses shared memory."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return apart
