"""The rows of each batch, as a pure function of seed, worker and position."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import numpy as np

from thinwire.errors import ConfigError, DataError

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Position(NamedTuple):
    """A position in a worker's stream of batches; epoch and batch count from 0."""

    epoch: int = 0
    batch: int = 0


@final
class Sampler:
    """Splits every epoch of a shard into batches. Each row occurs once an epoch; the last batch may be short.

    The order of an epoch depends only on seed, worker and epoch, so a run that resumes at a position gets the rows it
    would have had. The only state is a cache of the current epoch's order.

    >>> sampler = Sampler(5, batch_size=2, seed=0, worker=0, shuffle=False)
    >>> sampler.batches_per_epoch, sampler.rows(Position(0, 2)).tolist(), sampler.next(Position(0, 2))
    (3, [4], Position(epoch=1, batch=0))
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, worker: int, shuffle: bool = True) -> None:
        for name, value, least in (
            ("num_rows", num_rows, 0),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("worker", worker, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more. Give a larger {name}.")
        self.num_rows, self.batch_size, self.seed, self.worker = num_rows, batch_size, seed, worker
        self.shuffle = shuffle
        self.batches_per_epoch = -(-num_rows // batch_size)
        self._cached: tuple[int, np.ndarray[Any, Any]] | None = None

    def rows(self, position: Position) -> Rows:
        """The row numbers of one batch. Raises DataError for a position past the end of its epoch."""
        epoch, batch = position
        if epoch < 0 or batch < 0 or batch >= max(self.batches_per_epoch, 1):
            raise DataError(
                f"batch {batch} of epoch {epoch} does not exist: {self.num_rows} rows in batches of "
                f"{self.batch_size} are {self.batches_per_epoch} batches an epoch, counted from 0. Resume "
                "with the batch size and data that the position comes from."
            )
        start = batch * self.batch_size
        stop = min(start + self.batch_size, self.num_rows)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return self._order(epoch)[start:stop].astype(np.int64)

    def next(self, position: Position) -> Position:
        """The position after this one; a shard without rows has empty epochs."""
        if position.batch + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.batch + 1)
        return Position(position.epoch + 1, 0)

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        cached = self._cached
        if cached is None or cached[0] != epoch:
            # Half the memory of int64, which matters for a shard of 100 million rows.
            order = np.arange(self.num_rows, dtype=np.int32 if self.num_rows < 2**31 else np.int64)
            sequence = np.random.SeedSequence(self.seed, spawn_key=(self.worker, epoch))
            np.random.Generator(np.random.Philox(sequence)).shuffle(order)
            cached = self._cached = (epoch, order)
        return cached[1]
