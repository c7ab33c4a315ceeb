"""Arguments of `fit` from a Caffe network and its solver, for a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thinwire.caffe.training import Training, input_names, training, whole_loss
from thinwire.cluster.frames import arrow_schema, first_row, image_decoder
from thinwire.data.columns import dense, is_tensor, prepared, stored_array
from thinwire.errors import ConfigError, DataError


class CaffeFit(NamedTuple):
    """A network as `TorchEstimator` trains it.

    Attributes:
        found: the content of the prototxts.
        inputs: the columns that a prediction needs, in the order of the net's inputs.
        arguments: arguments of `fit` that replace those of a torch network.
    """

    found: Training
    inputs: list[str]
    arguments: dict[str, Any]


def caffe_fit(
    files: Mapping[str, str | None], frame: Any, inputs: Sequence[str] | None, label: str, options: Mapping[str, Any]
) -> CaffeFit:
    """The arguments with which to call `fit`.

    Args:
        files: the estimator's paths under "caffe", "solver" and "weights".
        frame: the rows.
        inputs: columns for the network's inputs, if the user names them.
        label: the column of labels.
        options: arguments of `fit` that the user has set; they override the solver's.
    """
    blobs = input_names(files["caffe"], files["solver"])
    taken = list(inputs) if inputs is not None else [name for name in blobs if name in frame.columns and name != label]
    if len(blobs) - len(taken) not in (0, 1) or not taken:
        raise ConfigError(
            f"input_cols = {taken} are {len(taken)} columns, and the net takes {', '.join(blobs)}; name one column for "
            "each input but the last, which label_col gives, or one for each"
        )
    columns = taken if len(taken) == len(blobs) else [*taken, label]
    transform = options.get("transform")
    shapes = dict(zip(blobs, _row_shapes(frame, columns), strict=True)) if transform is None else {}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    found = training(files["caffe"], files["solver"], weights=files["weights"], shapes=known)
    arguments = {
        "inputs": columns,
        "label": None,
        "loss": whole_loss,
        "metrics": options.get("metrics") or found.metrics,
        "batch_size": options.get("batch_size") or found.batch_size or 64,
    }
    if options.get("validation") is not None:
        arguments["evaluate_every"] = options.get("evaluate_every") or found.evaluate_every
    if found.optimizer is not None:
        arguments["optimizer"] = found.optimizer
    if not any(options.get(name) for name in ("epochs", "steps", "until", "seconds")):
        arguments["steps"] = found.steps
    return CaffeFit(found, taken, arguments)


def _row_shapes(frame: Any, columns: Sequence[str]) -> list[tuple[int, ...] | None]:
    """The shape of one row of each column, from the first row of the data; None where it cannot be determined."""
    for name in columns:
        if name not in frame.columns:
            raise DataError(f"column {name!r} is not in the data, which has {', '.join(frame.columns)}")
    chosen = frame.select(*[f"`{name}`" for name in columns])
    row = first_row(chosen, arrow_schema(chosen))
    if row is None or not row.num_rows:
        return [None] * len(columns)
    row, decode = prepared(row, columns), image_decoder(chosen)
    found: list[tuple[int, ...] | None] = []
    for name in columns:
        column = row.column(name)
        if is_tensor(column.type) and not column.null_count:
            found.append(tuple(dense(stored_array(column)).shape[1:]))
        elif decode is not None and isinstance(
            value := decode({name: column.to_numpy(zero_copy_only=False)})[name], np.ndarray
        ):
            found.append(tuple(value.shape[1:]) if value.dtype != object else None)
        else:
            found.append(None)
    return found
