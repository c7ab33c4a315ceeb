"""Deals a source's rows out to workers: shard files for training and for validation, in one pass."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa

from thinwire.data.columns import Nullable, refuse_nulls, refuse_other_schema
from thinwire.data.labels import look_at
from thinwire.data.shards import SMALL_BYTES, ShardWriter, rechunk
from thinwire.data.sources import Source, plain, select
from thinwire.data.weights import Weights
from thinwire.errors import ConfigError, DataError
from thinwire.replicas.labels import ANY, Labels, WrongLabels, nothing_to_learn

_ALL_WRITERS_BYTES = 256 << 20


class ShardFiles(NamedTuple):
    """The files of one worker and their numbers of rows; no validation file where none was asked for."""

    train: str
    validation: str | None
    num_rows: int
    num_validation_rows: int
    same: str | None = None
    """The label that all rows have, where a worker has found only one."""


def split(
    source: Source,
    *,
    workers: int,
    directory: str,
    validation: float | Source | None = None,
    seed: int = 0,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    labels: Labels = ANY,
    nullable: Nullable = False,
    weight: str | None = None,
) -> list[ShardFiles]:
    """Deals the rows of a source out to `workers` shards in `directory`, every row to one shard.

    Rows are shuffled within each 8 to 64 MiB and dealt in turn. Shards therefore differ by at most one row, and a file
    sorted by label gives every worker all labels. The same batches, workers and seed give the same shards.

    Args:
        source: The rows; they are streamed, at most a few hundred MiB at a time.
        workers: Number of shards; with more workers than rows some are empty.
        directory: Folder of the files; created if it does not exist.
        validation: A share of the rows to hold back, spread evenly over the source and chosen by the seed; or a source
            of its own with the same columns.
        seed: Seed of the shuffle and of the choice of validation rows.
        columns: The columns to write; None writes all. Nulls in other columns are allowed.
        label: The label column, which is checked for values that the loss cannot take; None checks none.
        labels: The labels that the loss takes.
        nullable: Columns that may have nulls because a transform fills them.
        weight: The column of row weights, which is checked; None checks none.

    Raises:
        ConfigError: `workers`, `seed` or the share is out of range.
        DataError: There are no rows to train on, a column has nulls, a label is wrong, or the validation columns
        differ.
    """
    share, apart = (validation, None) if isinstance(validation, (int, float)) else (0.0, validation)
    num_held = _rows_to_hold_back(source.num_rows, workers, share, seed)
    if columns is not None:
        source = select(source, columns)
        apart = None if apart is None else _selected(apart, columns)
    source, apart = plain(source), None if apart is None else plain(apart)
    if apart is not None:
        refuse_other_schema(apart.schema, source.schema, "the validation data")
    os.makedirs(directory, exist_ok=True)
    shard_sets: list[_ShardSet] = []
    try:
        for kind in ("train", "validation") if share or apart is not None else ("train",):
            shard_sets.append(_ShardSet(directory, kind, source.schema, workers, nullable))
        random = np.random.Generator(np.random.Philox(seed))
        look = functools.partial(_checked, label=label, labels=labels, nullable=nullable, weight=weight)
        _deal(look(source, of=""), source.num_rows, shard_sets, num_held, random)
        if apart is not None:
            _deal(look(apart, of=" of the validation data"), apart.num_rows, shard_sets[1:], 0, random)
        counts = [shard_set.close() for shard_set in shard_sets]
    except BaseException:
        for shard_set in shard_sets:
            shard_set.abort()
        raise
    if len(shard_sets) == 1:
        return [ShardFiles(path, None, rows, 0) for path, rows in zip(shard_sets[0].paths, counts[0], strict=True)]
    pairs = zip(shard_sets[0].paths, shard_sets[1].paths, *counts, strict=True)
    return [ShardFiles(*pair) for pair in pairs]


def _selected(apart: Source, columns: Sequence[str]) -> Source:
    """The columns of the validation data; the error for a missing column says that it is missing there."""
    try:
        return select(apart, columns)
    except DataError as error:
        raise DataError(f"the validation data does not have the columns that are trained on: {error}") from error


@final
class _ShardSet:
    """The open shard files of one kind, one for each worker; rows are dealt to them in turn."""

    def __init__(self, directory: str, kind: str, schema: Any, workers: int, nullable: Nullable) -> None:
        self.paths = [os.path.join(directory, f"{kind}-{worker:05d}.arrow") for worker in range(workers)]
        small_bytes = min(SMALL_BYTES, _ALL_WRITERS_BYTES // workers)
        self._writers: list[ShardWriter] = []
        self._turn = 0
        try:
            for path in self.paths:
                self._writers.append(ShardWriter(path, schema, small_bytes=small_bytes, nullable=nullable))
        except BaseException:
            self.abort()
            raise

    def deal(self, batch: Any, rows: np.ndarray[Any, Any]) -> None:
        workers = len(self._writers)
        for index, writer in enumerate(self._writers):
            mine = rows[(index - self._turn) % workers :: workers]
            if len(mine):
                writer.write(batch.take(pa.array(mine)))
        self._turn = (self._turn + len(rows)) % workers

    def close(self) -> list[int]:
        return [writer.close() for writer in self._writers]

    def abort(self) -> None:
        for writer in self._writers:
            writer.abort()


def _deal(
    batches: Iterator[Any], num_rows: int, shard_sets: Sequence[_ShardSet], num_held: int, random: np.random.Generator
) -> None:
    """Deals all rows to the first group of files, except `num_held` rows to the second."""
    seen = held = 0
    for batch in rechunk(batches):
        order = random.permutation(batch.num_rows)
        seen += batch.num_rows
        # Each batch brings the rows held back up to their share so far, so that the number is exact at the end.
        quota = num_held * min(seen, num_rows) // max(num_rows, 1) - held
        held += quota
        if quota:
            shard_sets[1].deal(batch, order[:quota])
        shard_sets[0].deal(batch, order[quota:])
    if seen != num_rows:
        raise DataError(
            f"the data reported {num_rows} rows and gave {seen}; both must agree. "
            "Make sure that no process writes to it while it is read."
        )


def _checked(
    source: Source, *, label: str | None, labels: Labels, nullable: Nullable, weight: str | None, of: str
) -> Iterator[Any]:
    weights = None if weight is None else Weights(weight, of)
    first_row, wrong = 0, WrongLabels(labels, f"column {label!r}{of}")
    for batch in source.batches():
        refuse_nulls(batch, first_row, nullable)
        if label is not None:
            look_at(batch, label, wrong)
        if weights is not None:
            weights.look_at(batch)
        first_row += batch.num_rows
        yield batch
    wrong.refuse()
    if weights is not None:
        weights.refuse(all_rows=True)
    if wrong.same is not None and not of and label is not None:
        warnings.warn(nothing_to_learn(label, first_row, wrong.same), stacklevel=2)


def _rows_to_hold_back(num_rows: int, workers: int, share: float, seed: int) -> int:
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be 1 or more. Give the number of shards to make.")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or more. Give another number.")
    if not 0 <= share < 1:
        raise ConfigError(
            f"validation is {share}; a share of the rows must be at least 0 and below 1. "
            "Give 0.1 to hold back a tenth, or a data set of its own."
        )
    if num_rows == 0:
        raise DataError("the data has 0 rows; at least one is needed. Check the path or the filter it comes from.")
    num_held = round(share * num_rows)
    if num_held == num_rows:
        raise DataError(
            f"validation {share} of {num_rows} rows leaves none to train on; at least one must be left. "
            "Give a smaller share or more rows."
        )
    return num_held
