"""RDDs of Spark as rows: which columns their records make, and the records as Arrow record batches.

This module imports neither pyspark nor torch. Tasks of the RDD run its functions: they turn records into batches where
the records lie, and send them as bytes, so that arrays never become lists of Python numbers. Importing torch would take
the processes of those tasks seconds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from thinwire.errors import DataError

LOOKED_AT = 32
"""Records that are read to decide the types of the columns."""
PACK_BYTES = 16 << 10
"""Approximate size of one batch: Spark passes ten thousand batches on at a time."""
_ALLOWED = "a pair (array, label), an array, a Row or a dict of named values is allowed"
_LEAVES = {
    "b1": pa.bool_(),
    "i1": pa.int8(),
    "i2": pa.int16(),
    "i4": pa.int32(),
    "i8": pa.int64(),
    "u1": pa.int16(),  # Spark has no unsigned numbers
    "u2": pa.int32(),
    "u4": pa.int64(),
    "u8": pa.int64(),
    "f2": pa.float32(),
    "f4": pa.float32(),
    "f8": pa.float64(),
}


def is_rdd(data: object) -> bool:
    """Whether data is an RDD of PySpark, without importing pyspark."""
    return any(kind.__name__ == "RDD" and kind.__module__.startswith("pyspark.") for kind in type(data).__mro__)


class Packing(NamedTuple):
    """How records become batches.

    Attributes:
        schema: Arrow schema, of types that Spark has too.
        rows: records in one batch.
    """

    schema: Any
    rows: int

    def __call__(self, records: Iterable[Any]) -> Iterator[bytes]:
        """Records as the bytes of record batches, without their schema."""
        records = iter(records)
        while chunk := list(itertools.islice(records, self.rows)):
            named = [columns_of(record) for record in chunk]
            columns = [_column(field, named) for field in self.schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
            yield batch.serialize().to_pybytes()

    def opened(self, packed: Iterable[bytes]) -> Iterator[Any]:
        """Reads record batches from their bytes."""
        for data in packed:
            yield pa.ipc.read_record_batch(pa.py_buffer(data), self.schema)


def packing_of(records: Sequence[Any]) -> Packing:
    """Decides from some records how those of an RDD become batches.

    Raises:
        DataError: There are no records, or they are of no known kind.
    """
    first = [columns_of(record) for record in records]
    if not first:
        raise DataError(
            "the RDD has no records; rows are needed to train on. Look at the path or filter it comes from."
        )
    for named in first:
        _refuse_other_columns(named, list(first[0]))
    fields = [_field(name, [named[name] for named in first]) for name in first[0]]
    size = max(sum(getattr(_plain(v), "nbytes", 8) for v in named.values()) for named in first)
    return Packing(pa.schema(fields), max(1, PACK_BYTES // max(1, size)))


def collected(rdd: Any) -> Any:
    """An RDD's records as one Arrow table in this process."""
    packing = packing_of(rdd.take(LOOKED_AT))
    packed = rdd.mapPartitions(functools.partial(packs, tuple(packing))).collect()
    return pa.Table.from_batches(packing.opened(bytes(pack) for (pack,) in packed), packing.schema)


def packs(packing: tuple[Any, int], records: Iterable[Any]) -> Iterator[tuple[bytearray]]:
    """A task of the RDD: packs records into rows of one column of bytes."""
    for pack in Packing(*packing)(records):
        yield (bytearray(pack),)


def unpacked(packing: tuple[Any, int], batches: Iterable[Any]) -> Iterator[Any]:
    """A task of a DataFrame: batches of packed bytes as batches of the records' own columns."""
    opened = Packing(*packing)
    for batch in batches:
        table = pa.Table.from_batches(opened.opened(batch.column(0).to_pylist()), opened.schema)
        yield from table.combine_chunks().to_batches()


def columns_of(record: Any) -> dict[str, Any]:
    """One record's values by column: "features" and "label" of a pair, the field names of a Row or a dict.

    >>> columns_of(([0.5, 1.0], 3)), columns_of({"age": 40, "label": 1})
    ({'features': [0.5, 1.0], 'label': 3}, {'age': 40, 'label': 1})
    """
    if isinstance(record, Mapping):
        return {str(name): value for name, value in record.items()}
    if fields := getattr(record, "__fields__", None) or getattr(record, "_fields", None):  # a Row, a named tuple
        return dict(zip(fields, record, strict=True))
    if hasattr(record, "features") and hasattr(record, "label"):  # a LabeledPoint
        return {"features": record.features, "label": record.label}
    if isinstance(record, tuple):
        if len(record) != 2:
            raise DataError(
                f"a record of the RDD is a tuple of {len(record)}; {_ALLOWED}. Map the records to one of those."
            )
        return {**_features(record[0]), "label": record[1]}
    if isinstance(record, list) or _is_array(record):
        return _features(record)
    raise DataError(
        f"a record of the RDD is a {type(record).__name__}: {str(record)[:80]!r}; {_ALLOWED}. Map the records to one "
        "of those."
    )


def _features(value: Any) -> dict[str, Any]:
    """One array as "features", or several as "features_0", "features_1" and so on."""
    several = isinstance(value, (list, tuple)) and bool(value) and all(map(_is_array, value))
    return {f"features_{i}": part for i, part in enumerate(value)} if several else {"features": value}


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _is_array(value: Any) -> bool:
    """Whether a value is an array or a vector; lists and numbers are not."""
    return hasattr(value, "toArray") or ((isinstance(value, np.ndarray) or hasattr(value, "detach")) and value.ndim > 0)


def _plain(value: Any) -> Any:
    """A value as a numpy array; texts, bytes and None unchanged."""
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return bytes(value) if isinstance(value, bytearray) else value
    if hasattr(value, "toArray"):  # a vector of Spark ML
        value = value.toArray()
    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths
        return np.empty((), object)


def _refuse_other_columns(named: Mapping[str, Any], names: list[str]) -> None:
    if set(named) != set(names):
        raise DataError(
            f"a record of the RDD has {', '.join(map(repr, named))} where the first has {', '.join(map(repr, names))}; "
            "all need the same. Map the records to one form."
        )


def _field(name: str, values: list[Any]) -> Any:
    """The name and type of a column, decided from the values of some records."""
    values = [value for value in values if value is not None]
    found = [_plain(value) for value in values]
    if not found:
        raise DataError(f"{name!r} is None in each of the RDD's first records; give each record a value.")
    for kind, arrow in ((str, pa.string()), (bytes, pa.binary())):
        if all(isinstance(value, kind) for value in found):
            return pa.field(name, arrow)
    arrays = [value for value in found if isinstance(value, np.ndarray)]
    dims = {value.ndim for value in arrays}
    kinds = {value.dtype for value in arrays}
    if len(arrays) < len(found) or len(dims) > 1 or any(kind.kind not in "biuf" for kind in kinds):
        pairs = zip(values, found, strict=True)
        shown = next((v for v, f in pairs if not isinstance(f, np.ndarray) or f.dtype.kind not in "biuf"), values[-1])
        raise DataError(
            f"{name!r} of the RDD's records is not an array of numbers: {str(shown)[:80]!r} ({type(shown).__name__}); "
            "numbers, booleans, texts, bytes, vectors, and arrays of one number of dimensions are allowed. Map the "
            "records to those."
        )
    wide = np.result_type(*kinds)
    kind = _LEAVES[wide.kind + str(wide.itemsize)] if wide.itemsize <= 8 else pa.float64()
    for _ in range(dims.pop()):
        kind = pa.list_(kind)
    return pa.field(name, kind)


def _column(field: Any, records: list[dict[str, Any]]) -> Any:
    """The values of one column in some records, as an Arrow array."""
    for named in records:
        if field.name not in named:
            raise DataError(
                f"a record of the RDD has {', '.join(map(repr, named))} and no {field.name!r}, which the first has; "
                "all need the same. Map the records to one form."
            )
    values = [_plain(named[field.name]) for named in records]
    try:
        if not pa.types.is_list(field.type):
            return pa.array([v.item() if isinstance(v, np.ndarray) else v for v in values], field.type)
        if any(value is None for value in values) or len({value.shape for value in values}) > 1:
            return pa.array([None if value is None else value.tolist() for value in values], field.type)
        return _lists(field.type, np.stack(values))
    except (pa.ArrowException, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{field.name!r} of a record of the RDD is not a {field.type} as in the first records: {_line(error)}. Map "
            "the records to one type."
        ) from error


def _lists(kind: Any, array: np.ndarray[Any, Any]) -> Any:
    """Arrays of one shape, stacked along the rows, as an Arrow array of nested lists."""
    kinds = []
    while pa.types.is_list(kind):
        kinds.append(kind)
        kind = kind.value_type
    if len(kinds) != array.ndim - 1:
        raise ValueError(f"an array of {array.ndim - 1} dimensions")
    found = pa.array(np.ascontiguousarray(array).reshape(-1)).cast(kind)
    for outer in reversed(kinds):
        length = array.shape[kinds.index(outer) + 1]
        count = int(np.prod(array.shape[: kinds.index(outer) + 1]))
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(length))
        found = pa.ListArray.from_arrays(offsets, found, type=outer)
    return found


def sums(column: str, batches: Iterable[Any]) -> Iterator[Any]:
    """A task of a DataFrame: counts the rows of some batches and sums a column of arrays."""
    for count, total in _summed(column, batches):
        data = {"count": [count], "shape": [list(total.shape)], "total": [total.tobytes()]}
        yield pa.RecordBatch.from_pydict(data, schema=SUMS)


def sums_of_records(packing: tuple[Any, int], column: str, records: Iterable[Any]) -> Iterator[Any]:
    """A task of an RDD: counts the records of some packs and sums a column of arrays."""
    packed = Packing(*packing)
    for count, total in _summed(column, packed.opened(packed(records))):
        yield count, total.shape, total.tobytes()


SUMS = pa.schema([("count", pa.int64()), ("shape", pa.list_(pa.int64())), ("total", pa.binary())])


def _summed(column: str, batches: Iterable[Any]) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    count, total = 0, None
    for batch in batches:
        array = batch.column(column)
        if not len(array):
            continue
        found = np.asarray(_dense(array), np.float64).sum(axis=0)
        if total is not None and total.shape != found.shape:
            raise DataError(
                f"column {column!r} has arrays of {total.shape} and of {found.shape}; bring them to one shape"
            )
        count, total = count + len(array), found if total is None else total + found
    if total is not None:
        yield count, total


def _dense(array: Any) -> np.ndarray[Any, Any]:
    """A column of arrays of one shape, stacked along the rows."""
    if isinstance(array, pa.ExtensionArray) and hasattr(array, "to_numpy_ndarray"):
        return np.asarray(array.to_numpy_ndarray())
    shape = [len(array)]
    while not pa.types.is_primitive(array.type):
        inner = array.flatten()
        if shape[-1] and len(inner) % len(array):
            raise DataError("the arrays of a column differ in length; bring them to one shape")
        shape.append(len(inner) // len(array))
        array = inner
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)
