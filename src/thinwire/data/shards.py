"""A worker's rows on disk: one memory-mapped Arrow IPC file, written as a stream and read by row number."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import pyarrow as pa
import torch

from thinwire.data import columns as _columns
from thinwire.errors import DataError, nearest

SMALL_BYTES = 8 << 20
GIANT_BYTES = 64 << 20

Array = np.ndarray[Any, Any]


def rechunk(batches: Iterable[Any], small_bytes: int = SMALL_BYTES) -> Iterator[Any]:
    """The same rows in record batches of at least `small_bytes`, except the last, and at most 64 MiB."""
    waiting: list[Any] = []
    waiting_bytes = 0
    for batch in batches:
        for piece in _sliced(batch):
            waiting.append(piece)
            waiting_bytes += piece.nbytes
            if waiting_bytes >= small_bytes:
                yield from _joined(waiting)
                waiting, waiting_bytes = [], 0
    yield from _joined(waiting)


@final
class ShardWriter:
    """Takes record batches and writes a whole shard file to `path`, or none."""

    def __init__(
        self, path: str, schema: Any, *, small_bytes: int = SMALL_BYTES, nullable: _columns.Nullable = False
    ) -> None:
        self.num_rows = 0
        self._nullable = nullable
        self._path, self._schema, self._small_bytes = path, schema, small_bytes
        names = list(schema.names)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"column {twice[0]!r} is there more than once; names must differ. Rename one of them.")
        self._stored = pa.schema([_columns.stored_field(field) for field in schema])
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._partial = f"{path}.{uuid.uuid4().hex[:8]}.partial"
        self._sink = pa.OSFile(self._partial, "wb")
        self._writer = pa.ipc.new_file(self._sink, self._stored)

    def write(self, batch: Any) -> None:
        """Adds the rows of one record batch. Raises DataError for nulls or for another schema."""
        _columns.refuse_other_schema(batch.schema, self._schema, "a record batch")
        _columns.refuse_nulls(batch, self.num_rows, self._nullable)
        self.num_rows += batch.num_rows
        for piece in _sliced(batch):
            stored = [_columns.stored_array(array) for array in piece.columns]
            self._waiting.append(pa.RecordBatch.from_arrays(stored, schema=self._stored))
            self._waiting_bytes += piece.nbytes
            if self._waiting_bytes >= self._small_bytes:
                self._flush()

    def close(self) -> int:
        """Completes the file, gives it its name, and returns the number of rows."""
        self._flush()
        self._writer.close()
        self._sink.close()
        os.replace(self._partial, self._path)
        return self.num_rows

    def abort(self) -> None:
        """Removes the unfinished file; allowed at any time, and without effect after `close`."""
        self._waiting = []
        self._sink.close()
        if os.path.exists(self._partial):
            os.unlink(self._partial)

    def _flush(self) -> None:
        for batch in _joined(self._waiting):
            self._writer.write_batch(batch)
        self._waiting, self._waiting_bytes = [], 0


def write_shard(path: str, batches: Iterable[Any], schema: Any, *, nullable: _columns.Nullable = False) -> int:
    """Writes record batches to a shard file and returns the number of its rows.

    The file gets its name only when it is whole. At most 64 MiB of rows are held in memory.

    Raises:
        DataError: A column that is not `nullable` has nulls, or a batch has another schema than `schema`.
    """
    writer = ShardWriter(path, schema, nullable=nullable)
    try:
        for batch in batches:
            writer.write(batch)
        return writer.close()
    except BaseException:
        writer.abort()
        raise


@final
class Shard:
    """The rows of one worker, read by row number from a memory-mapped file. Made by `Shard.open`."""

    def __init__(self, fields: Sequence[Any], batches: Sequence[Any]) -> None:
        self.columns: tuple[str, ...] = tuple(field.name for field in fields)
        self._ends = np.cumsum([batch.num_rows for batch in batches])
        self._starts = self._ends - [batch.num_rows for batch in batches]
        self.num_rows = int(self._ends[-1])
        self._single = len(batches) == 1
        self._dense: dict[str, _Dense] = {}
        self._other: dict[str, list[Any]] = {}
        self._why: dict[str, str] = {}
        self._forms: dict[str, Any] = {}
        for index, field in enumerate(fields):
            chunks = [batch.column(index) for batch in batches]
            if count := sum(map(_columns.count_nulls, chunks)):
                self._other[field.name], self._forms[field.name] = chunks, _columns.form_with_nulls(chunks)
                self._why[field.name] = f"column {field.name!r} has {count} null{'s' if count > 1 else ''}"
                continue
            try:
                self._dense[field.name] = _Dense(field, chunks)
            except _NoTensorError as error:
                self._other[field.name], self._why[field.name] = chunks, str(error)

    @classmethod
    def open(cls, path: str) -> Shard:
        """Maps the file at `path`; rows are read when taken. Raises DataError where it is not a whole shard."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(path, "r"))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate(full=True)  # refuses offsets that point outside the data
            schema = reader.schema
            return cls(list(schema), [batch for batch in batches if batch.num_rows] or [_empty(schema)])
        except _columns.UNREADABLE as error:
            raise DataError(
                f"{path!r} cannot be read as a shard ({_columns.reason(error)}); a shard is an Arrow file that was "
                "written to its end. Write it again from the data."
            ) from error

    def take(self, rows: Array, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor | Array]:
        """The given rows of the given columns (None for all), in the given order.

        Columns of numbers come as tensors that own their memory, in their stored dtype. Other columns, such as strings
        or lists of different lengths, come as numpy arrays, mostly of objects, for a transform to convert. Columns of
        numbers with nulls come as tensors of floats with NaN; other columns with nulls have None.

        Args:
            rows: Row numbers from 0 to `num_rows` - 1, of an integer dtype.
            columns: Names from `self.columns`.
        """
        spots = None if self._single else self._spots(rows)
        out: dict[str, torch.Tensor | Array] = {}
        for name in self.columns if columns is None else columns:
            if (column := self._dense.get(name)) is not None:
                out[name] = column.take(rows) if spots is None else column.gather(spots, len(rows))
            else:
                found = self._objects(name, rows, spots)
                out[name] = torch.from_numpy(found) if self._forms.get(name) is not None else found
        return out

    @property
    def with_nulls(self) -> frozenset[str]:
        """Columns that have nulls."""
        return frozenset(self._forms)

    def why_no_tensor(self, column: str) -> str | None:
        """Why a column cannot be a tensor, in words; None where it can."""
        self._require(column)
        return self._why.get(column)

    def _require(self, column: str) -> None:
        if column not in self.columns:
            raise DataError(f"column {column!r} is not in the data. {nearest(column, self.columns)} Name one of those.")

    def _spots(self, rows: Array) -> list[_Spot]:
        """The given rows by chunk: the chunk, the indices into `rows`, and the row numbers within the chunk."""
        chunk_of = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(chunk_of, kind="stable")
        sorted_chunks = chunk_of[order]
        cuts = [0, *(np.flatnonzero(np.diff(sorted_chunks)) + 1).tolist(), len(rows)]
        local = rows[order] - self._starts[sorted_chunks]
        return [(int(sorted_chunks[a]), order[a:b], local[a:b]) for a, b in pairwise(cuts) if a < b]

    def _objects(self, name: str, rows: Array, spots: list[_Spot] | None) -> Array:
        self._require(name)
        out: Array | None = None
        for chunk, where, local in spots or [(0, np.arange(len(rows)), rows)]:
            try:
                taken = self._other[name][chunk].take(pa.array(local))
                if name in self._forms:
                    part = _columns.shown_with_nulls(taken, self._forms[name])
                else:
                    part = taken.to_numpy(zero_copy_only=False)
            except _columns.UNREADABLE as error:
                raise DataError(
                    f"column {name!r} cannot be read ({_columns.reason(error)}); numbers, text, lists and dates can. "
                    "Leave it out, or convert it."
                ) from error
            if out is None:
                out = np.empty(len(rows), part.dtype)
            out[where] = part
        assert out is not None
        return out


_Spot = tuple[int, Array, Array]
_RAGGED = "column {!r} has lists of different lengths: row {} has {} values, row {} has {}"


class _NoTensorError(Exception):
    """A column cannot be a tensor; the message says why."""


@final
class _Dense:
    """Zero-copy views of one tensor column, one for each chunk."""

    def __init__(self, field: Any, chunks: Sequence[Any]) -> None:
        if not _columns.is_tensor(field.type):
            raise _NoTensorError(f"column {field.name!r} holds {field.type}, not numbers")
        self._views: list[Array] = []
        self._order = _columns.permutation(field.type)
        first_row = 0
        for chunk in chunks:
            try:
                view = _columns.dense(chunk)
            except _columns.RaggedError as error:
                there = first_row, error.expected, first_row + error.row, error.length
                raise _NoTensorError(_RAGGED.format(field.name, *there)) from None
            if self._views and view.shape[1:] != self._views[0].shape[1:]:
                lengths = zip(self._views[0].shape[1:], view.shape[1:], strict=True)
                ours, theirs = next((a, b) for a, b in lengths if a != b)
                raise _NoTensorError(_RAGGED.format(field.name, 0, ours, first_row, theirs))
            self._views.append(view.view(np.bool_) if _columns.is_stored_bool(field) else view)
            first_row += len(chunk)

    def take(self, rows: Array) -> torch.Tensor:
        return self._shown(self._views[0].take(rows, 0))

    def gather(self, spots: list[_Spot], num_rows: int) -> torch.Tensor:
        first = self._views[0]
        out = np.empty((num_rows, *first.shape[1:]), first.dtype)
        for chunk, where, local in spots:
            out[where] = self._views[chunk][local]
        return self._shown(out)

    def _shown(self, values: Array) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._order is None else tensor.permute(self._order).contiguous()


def _empty(schema: Any) -> Any:
    """A record batch without rows."""
    columns = []
    for field in schema:
        extended = isinstance(field.type, pa.BaseExtensionType)
        none = pa.array([], field.type.storage_type if extended else field.type)
        columns.append(pa.ExtensionArray.from_storage(field.type, none) if extended else none)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _sliced(batch: Any) -> Iterator[Any]:
    """Splits a record batch into pieces of at most 64 MiB, or of one row."""
    step = max(1, batch.num_rows * GIANT_BYTES // max(batch.nbytes, GIANT_BYTES))
    for start in range(0, batch.num_rows, step):
        yield batch if step >= batch.num_rows else batch.slice(start, step)


def _joined(batches: list[Any]) -> list[Any]:
    """The rows of several record batches in one, or in none."""
    if len(batches) <= 1:
        return batches
    joined: list[Any] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
