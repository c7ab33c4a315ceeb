"""One Arrow column as numpy sees it: which types are tensors, views of their bytes, and errors about nulls.

A shard file holds a column in its *stored* form, which can be viewed without a copy: booleans as one byte each (Arrow
packs eight into one), dictionaries as their values. Other types are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thinwire.errors import DataError

_BOOL = {b"thinwire.dtype": b"bool"}
_EXACT = 2**53
"""Doubles represent all whole numbers up to this one exactly."""
Nullable = bool | tuple[str, ...]
"""Columns that may have nulls because a transform fills them: all, none, or those named."""


UNREADABLE = (pa.ArrowException, ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)
"""Exceptions that Arrow raises for a file that is damaged or malicious."""


def reason(error: BaseException) -> str:
    """The first line of an error of Arrow, at most 300 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class RaggedError(Exception):
    """Lists differ in length; `row` is the first row whose length differs from that of row 0."""

    def __init__(self, row: int, length: int, expected: int) -> None:
        super().__init__(f"row {row} has {length} values where row 0 has {expected}")
        self.row, self.length, self.expected = row, length, expected


def is_number(kind: Any) -> bool:
    """Whether values of this Arrow type are numbers or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_list(kind: Any) -> bool:
    """Whether this Arrow type is a list of any kind that `dense` can view."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_tensor(kind: Any) -> bool:
    """Whether this Arrow type can become a tensor: numbers, and nested lists of numbers."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return is_number(kind.value_type)
    while is_list(kind):
        kind = kind.value_type
    return is_number(kind)


def stored_type(kind: Any) -> Any:
    """The Arrow type that a column of type `kind` has in a shard file."""
    if pa.types.is_boolean(kind):
        return pa.uint8()
    if pa.types.is_dictionary(kind):
        return stored_type(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        if not pa.types.is_boolean(kind.value_type):
            return kind
        return pa.fixed_shape_tensor(pa.uint8(), kind.shape, dim_names=kind.dim_names, permutation=kind.permutation)
    if is_list(kind) and stored_type(kind.value_type) != kind.value_type:
        inner = stored_type(kind.value_type)
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return pa.large_list(inner) if pa.types.is_large_list(kind) else pa.list_(inner)
    return kind


def stored_field(field: Any) -> Any:
    """The field of a shard file's schema for a field of the data."""
    leaf = field.type.value_type if isinstance(field.type, pa.FixedShapeTensorType) else field.type
    while is_list(leaf) or pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    try:
        kind = stored_type(field.type)
    except UNREADABLE as error:  # such as lists of negative length, which a file may claim
        raise DataError(f"column {field.name!r} holds {field.type}, which is not possible: {reason(error)}") from error
    return pa.field(field.name, kind, metadata=_BOOL if pa.types.is_boolean(leaf) else None)


def stored_array(array: Any) -> Any:
    """One column's values in their stored form."""
    kind = stored_type(array.type)
    if kind == array.type:
        return array
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, array.storage.cast(kind.storage_type))
    return array.cast(kind)


def count_nulls(array: Any) -> int:
    """Counts nulls in an array at any depth: rows, list elements and struct fields."""
    if isinstance(array, pa.ExtensionArray):
        return count_nulls(array.storage)
    count = int(array.null_count)
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        return count_nulls(array.cast(array.type.value_type))
    if is_list(array.type):
        return count + count_nulls(array.flatten())
    if pa.types.is_struct(array.type):
        return count + sum(count_nulls(array.field(i)) for i in range(array.type.num_fields))
    return count


def may_be_null(name: str, nullable: Nullable) -> bool:
    """Whether a column may have nulls.

    >>> may_be_null("age", True), may_be_null("age", ("age",)), may_be_null("label", ("age",))
    (True, True, False)
    """
    return nullable if isinstance(nullable, bool) else name in nullable


def refuse_nulls(batch: Any, first_row: int, nullable: Nullable = False) -> None:
    """Raises a DataError that names the first column with nulls; `first_row` is the number of the batch's first row."""
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if may_be_null(name, nullable):
            continue
        if count := count_nulls(array):
            last = first_row + batch.num_rows - 1
            raise DataError(
                f"column {name!r} has {count} null{'s' if count > 1 else ''} in rows {first_row} to {last}; "
                "a value is needed in every row of every column that is read. Fill them or drop those rows "
                "first, give a transform that fills them, or leave the column out."
            )


def form_with_nulls(chunks: Sequence[Any]) -> Any:
    """The Arrow type in which a column with nulls becomes numbers, nulls as NaN; None where that would lose values.

    Floats keep their type. Booleans and whole numbers become doubles, unless doubles cannot represent them exactly.

    >>> form_with_nulls([pa.array([1, None])]), form_with_nulls([pa.array([2**60, None])])
    (DataType(double), None)
    """
    kind = chunks[0].type
    if pa.types.is_floating(kind):
        return kind
    if not is_number(kind):
        return None
    if pa.types.is_integer(kind) and kind.bit_width == 64:
        bounds = [pc.min_max(chunk).as_py() for chunk in chunks]
        ends = [abs(value) for found in bounds for value in found.values() if value is not None]
        return None if ends and max(ends) > _EXACT else pa.float64()
    return pa.float64()


def shown_with_nulls(array: Any, form: Any) -> np.ndarray[Any, Any]:
    """The values of a column that has nulls: in the given form with NaN, or as objects with None."""
    if form is not None:
        return np.asarray(array.cast(form).to_numpy(zero_copy_only=False))
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if is_number(array.type):
        found = np.empty(len(array), object)
        found[:] = array.to_pylist()
        return found
    return np.asarray(array.to_numpy(zero_copy_only=False))


def refuse_other_schema(found: Any, expected: Any, where: str) -> None:
    """Raises a DataError with the columns in which `found` differs from `expected` in name, type or order."""
    ours, theirs = [[f"{field.name!r} ({field.type})" for field in schema] for schema in (expected, found)]
    if ours == theirs:
        return
    missing = [column for column in ours if column not in theirs]
    extra = [column for column in theirs if column not in ours]
    parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)} instead"] * bool(extra)
    raise DataError(
        f"{where} {' and '.join(parts) or 'has its columns in another order'}; all parts of one data set "
        f"need the same columns: {', '.join(ours)}. Cast, rename, reorder or leave out what differs."
    )


def is_stored_bool(field: Any) -> bool:
    """Whether a stored field holds booleans as bytes."""
    return field.metadata is not None and field.metadata.get(b"thinwire.dtype") == b"bool"


def dense(array: Any) -> np.ndarray[Any, Any]:
    """A zero-copy view of a tensor column, rows first. Raises RaggedError where lists differ in length.

    >>> dense(pa.array([[1, 2], [3, 4], [5, 6]])).tolist()
    [[1, 2], [3, 4], [5, 6]]
    """
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        values = dense(array.storage.flatten())
        return values.reshape(len(array), *kind.shape)
    if pa.types.is_fixed_size_list(kind):
        values, size = dense(array.flatten()), kind.list_size
    elif is_list(kind):
        size = _common_length(array)
        try:
            values = dense(array.flatten())
        except RaggedError as error:
            raise RaggedError(error.row // size, error.length, error.expected) from None
    else:
        view: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=True)
        return view
    return values.reshape(len(array), size, *values.shape[1:])


def permutation(kind: Any) -> tuple[int, ...] | None:
    """The order in which a batch's axes are shown, where it differs from the stored order."""
    if not isinstance(kind, pa.FixedShapeTensorType) or kind.permutation is None:
        return None
    order = tuple(kind.permutation)
    return None if order == tuple(range(len(order))) else (0, *(axis + 1 for axis in order))


def _common_length(array: Any) -> int:
    if len(array) == 0:
        return 0
    lengths = np.diff(array.offsets.to_numpy(zero_copy_only=True))
    different = np.flatnonzero(lengths != lengths[0])
    if different.size:
        row = int(different[0])
        raise RaggedError(row, int(lengths[row]), int(lengths[0]))
    return int(lengths[0])


def prepared(batch: Any, names: Sequence[str]) -> Any:
    """The named columns in the form that shards have: vectors of Spark ML as lists, decimals as doubles."""
    columns = [_prepared(name, batch.column(name)) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def is_prepared(kind: Any) -> bool:
    """Whether a column of this Arrow type already has the form that shards have."""
    return not (is_vector(kind) or pa.types.is_decimal(kind))


def _prepared(name: str, array: Any) -> Any:
    if is_prepared(array.type):
        return array
    try:
        return _vectors(array) if is_vector(array.type) else array.cast(pa.float64())
    except UNREADABLE as error:
        raise DataError(
            f"column {name!r} holds {array.type} that cannot be read ({reason(error)}). Write it again."
        ) from error


def is_vector(kind: Any) -> bool:
    """Whether an Arrow type is that of an ML vector from Spark."""
    if not pa.types.is_struct(kind):
        return False
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    if fields.keys() != {"type", "size", "indices", "values"}:
        return False
    lists = all(pa.types.is_list(fields[name]) and is_number(fields[name].value_type) for name in ("indices", "values"))
    return lists and all(pa.types.is_integer(fields[name]) for name in ("type", "size"))


def _vectors(array: Any) -> Any:
    """Dense and sparse ML vectors as lists of float32."""
    if array.null_count:
        there = array.is_valid()
        places = pc.if_else(there, pc.subtract(pc.cumulative_sum(there.cast(pa.int64())), 1), None)
        return _vectors(array.drop_null()).take(places)
    if not len(array):
        return pa.array([], pa.list_(pa.float32()))
    kinds, values = array.field("type").to_numpy(zero_copy_only=False), array.field("values")
    lengths = np.diff(values.offsets.to_numpy())
    if kinds.all() and (values.null_count == 0):
        flat = values.flatten().cast(pa.float32())
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), flat)
    sizes = array.field("size").to_numpy(zero_copy_only=False)
    rows = []
    for row in range(len(array)):
        given = np.asarray(values[row].as_py(), np.float32)
        if not kinds[row]:
            dense = np.zeros(int(sizes[row]), np.float32)
            dense[np.asarray(array.field("indices")[row].as_py(), np.int64)] = given
            given = dense
        rows.append(given)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))
