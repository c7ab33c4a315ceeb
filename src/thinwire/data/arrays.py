"""Arrow tables from arrays of numpy, torch, or any library whose arrays numpy can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from thinwire.errors import DataError


def table_of_arrays(arrays: Mapping[str, Any]) -> Any:
    """A table with one column per array, rows along the first dimension; contiguous memory is not copied.

    Arrays of more than one dimension become fixed_shape_tensor columns.
    """
    if not arrays:
        raise DataError("the dict of arrays is empty; at least one column is needed. Write {'name': array}.")
    columns = {str(name): column_of_array(str(name), array) for name, array in arrays.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r}: {length}" for name, length in lengths.items())
        raise DataError(
            f"the arrays differ in length ({shown}); each needs one entry per row. Cut or fill them to match."
        )
    return pa.table(columns)


def named_pair(features: Any, label: Any) -> dict[str, Any]:
    """Names for the arrays of (X, y): "label", and "features" or, for several, "features_0", "features_1" and so on."""
    several = isinstance(features, Sequence) and bool(features) and all(_is_array(part) for part in features)
    parts = {f"features_{i}": part for i, part in enumerate(features)} if several else {"features": features}
    return parts if label is None else {**parts, "label": label}


def column_of_array(name: str, values: Any) -> Any:
    """One Arrow column; raises DataError with its name where Arrow has no such type."""
    array = _as_numpy(values)
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        missing = int(np.ma.getmaskarray(values).sum())
        raise DataError(
            f"array {name!r} is masked, with {missing} values that are missing; a value is needed in every row. Fill "
            "them (array.filled(0)), or leave those rows out."
        )
    if array.ndim == 0 or 0 in array.shape[1:]:
        raise DataError(
            f"array {name!r} has shape {tuple(array.shape)}; the first dimension counts rows and the others "
            "must not be 0. Reshape it."
        )
    try:
        if array.ndim == 1:
            return pa.array(array.tolist() if array.dtype.kind in "OUS" else array)
        shape = array.shape[1:]
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
        return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), storage)
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"array {name!r} of {array.dtype} cannot be a column ({error}); numbers, booleans, strings and "
            "dates can. Convert it first."
        ) from error


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) or hasattr(value, "__array__")


def _as_numpy(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty(len(values), object)
        array[:] = values
    return array.astype(array.dtype.newbyteorder("="), copy=False)
