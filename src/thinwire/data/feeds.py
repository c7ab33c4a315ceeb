"""How a worker gets its rows: from files on its machine, from the driver over the wire, or from a stream of batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from thinwire.data.columns import Nullable, prepared, refuse_nulls
from thinwire.data.labels import look_at
from thinwire.data.shards import ShardWriter
from thinwire.data.split import ShardFiles
from thinwire.data.weights import Weights
from thinwire.errors import DataError, nearest
from thinwire.replicas.labels import ANY, Labels, WrongLabels

Fetch = Callable[[str], Iterator[bytes]]
"""Fetches one of this worker's files from the driver, piece by piece."""
Measure = Callable[[Any], "tuple[int, ...] | None"]
"""The shape of the model's output for the row of a record batch; None where it cannot be determined."""
TRAIN, VALIDATION = "train", "validation"
PIECE_BYTES = 4 << 20


NO_ROWS = (
    "there are no rows to train on: the data has none, or all of them are held back for validation. Look at the path "
    "or the filter that they come from, and at validation."
)


class Wanted(NamedTuple):
    """What a run needs from its data."""

    columns: tuple[str, ...] | None
    """Columns to read; None reads all, for a transform that may use any."""
    validation: float
    """Share of the rows to hold back."""
    indicator: str | None
    """Name of a column that is true for validation rows."""
    seed: int
    label: str | None = None
    """Name of the label column, which is checked for values that the loss cannot take; None checks none."""
    labels: Labels = ANY
    """The labels that the loss takes."""
    measure: Measure | None = None
    """Determines the shape of the model's output before rows are dealt out."""
    nullable: Nullable = False
    """Columns that may have nulls, because a transform fills them."""
    weight: str | None = None
    """The column of row weights, which is checked; None checks none."""

    def measured(self, first: Any | None) -> Wanted:
        """This request with what the first row tells; `first` is a record batch with the columns of this run."""
        if self.measure is None or first is None:
            return self._replace(measure=None)
        if not first.num_rows:
            raise DataError(NO_ROWS)
        output = self.measure(prepared(first.slice(0, 1), first.schema.names))
        return self._replace(measure=None, labels=self.labels.measured(output))


class Feed(Protocol):
    """Travels to workers and gives each its shard files."""

    def shard(self, worker: int, given: Iterable[Any] | None, fetch: Fetch) -> Any:
        """A context in which this worker's shard files can be opened; open files remain usable after it."""


@dataclass(frozen=True)
class Beside:
    """Files that the driver has written on this machine."""

    files: tuple[ShardFiles, ...]

    @contextmanager
    def shard(self, worker: int, given: Iterable[Any] | None, fetch: Fetch) -> Iterator[ShardFiles]:
        yield self.files[worker]


@dataclass(frozen=True)
class Fetched:
    """Files that the driver holds, and sends to each worker that asks."""

    validated: bool

    @contextmanager
    def shard(self, worker: int, given: Iterable[Any] | None, fetch: Fetch) -> Iterator[ShardFiles]:
        with _folder() as folder:
            paths = [os.path.join(folder, kind) for kind in (TRAIN, VALIDATION)[: 1 + self.validated]]
            for path in paths:
                with open(path, "wb") as file:
                    for piece in fetch(os.path.basename(path)):
                        file.write(piece)
            yield ShardFiles(paths[0], paths[1] if self.validated else None, 0, 0)


class Server:
    """The driver's side of `Fetched`."""

    def __init__(self, files: Sequence[ShardFiles]) -> None:
        self.files = files

    def piece(self, worker: int, name: str, index: int) -> tuple[bytes, int]:
        """One piece of a worker's file, and the number of pieces; no bytes and 0 pieces where there is no such file."""
        files = self.files[worker]
        path = {TRAIN: files.train, VALIDATION: files.validation}.get(name)  # `name` is a key, never a path
        count = 0 if path is None else max(1, -(-os.path.getsize(path) // PIECE_BYTES))
        if path is None or not 0 <= index < count:
            return b"", count
        with open(path, "rb") as file:
            file.seek(index * PIECE_BYTES)
            return file.read(PIECE_BYTES), count


@dataclass(frozen=True)
class Streamed:
    """Record batches that the cluster passes to each worker, which writes them to local files as they arrive."""

    schema: Any
    """Schema of the batches."""
    wanted: Wanted

    @contextmanager
    def shard(self, worker: int, given: Iterable[Any] | None, fetch: Fetch) -> Iterator[ShardFiles]:
        assert given is not None
        with _folder() as folder:
            yield self.ingest(worker, given, folder)

    def ingest(self, worker: int, given: Iterable[Any], folder: str) -> ShardFiles:
        """Writes the shard files of one worker."""
        wanted = self.wanted
        names = [n for n in wanted.columns or self.schema.names if n != wanted.indicator]
        for name in names:
            if name not in self.schema.names:
                raise DataError(f"column {name!r} is not in the data. {nearest(name, self.schema.names)}")
        apart = bool(wanted.validation) or wanted.indicator is not None
        schema = prepared(pa.RecordBatch.from_pylist([], self.schema), names).schema
        paths = [os.path.join(folder, kind) for kind in (TRAIN, VALIDATION)[: 1 + apart]]
        writers = [ShardWriter(path, schema, nullable=wanted.nullable) for path in paths]
        random = np.random.Generator(np.random.Philox([wanted.seed, worker]))
        seen = held = 0
        wrong = WrongLabels(wanted.labels, f"column {wanted.label!r} of worker {worker}'s rows")
        weights = None if wanted.weight is None else Weights(wanted.weight, f" of worker {worker}'s rows")
        for batch in given:
            rows = prepared(batch, names)
            refuse_nulls(rows, seen, wanted.nullable)
            if wanted.label is not None:
                look_at(rows, wanted.label, wrong)
            if weights is not None:
                weights.look_at(rows)
            seen += rows.num_rows
            if not apart:
                writers[0].write(rows)
                continue
            if wanted.indicator is not None:
                mask = _truth(batch, wanted.indicator, seen - batch.num_rows)
            else:
                mask = np.zeros(rows.num_rows, bool)
                quota = int(wanted.validation * seen + 0.5) - held
                held += quota
                mask[random.permutation(rows.num_rows)[:quota]] = True
            writers[0].write(rows.filter(pa.array(~mask)))
            writers[1].write(rows.filter(pa.array(mask)))
        wrong.refuse()
        if weights is not None:
            weights.refuse(all_rows=False)
        counts = [writer.close() for writer in writers]
        return ShardFiles(paths[0], paths[1] if apart else None, counts[0], counts[1] if apart else 0, wrong.same)


def _truth(batch: Any, name: str, first_row: int) -> np.ndarray[Any, Any]:
    column = batch.column(name)
    refuse_nulls(pa.RecordBatch.from_arrays([column], names=[name]), first_row)
    if not pa.types.is_boolean(column.type):
        raise DataError(
            f"column {name!r} holds {column.type}; it must hold true for validation rows and false for others: booleans"
        )
    found: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False).astype(bool)
    return found


@contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder on a local disk; Spark names a disk with room."""
    place = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS") or tempfile.gettempdir()
    chosen = next((p for p in place.split(",") if os.path.isdir(p) and os.access(p, os.W_OK)), None)
    with tempfile.TemporaryDirectory(prefix="thinwire-shard-", dir=chosen) as folder:
        yield folder
