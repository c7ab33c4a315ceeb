"""Checks the rows that workers report when they join: whether there is anything to learn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from thinwire.errors import DataError
from thinwire.protocol.messages import Join
from thinwire.replicas.labels import nothing_to_learn


class Rows:
    """Checks the rows of all workers once, when the last worker has joined."""

    def __init__(self, workers: int) -> None:
        self._workers, self._same = workers, dict[int, str | None]()
        self._held: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Validation rows of all workers that have ever joined."""
        return sum(self._held.values())

    def heard(self, worker: int, join: Join, rows: Mapping[int, int]) -> None:
        """Notes the rows of a worker that joins.

        Raises:
            DataError: All workers have joined, and none has rows.
        """
        before = len(self._same) == self._workers
        if worker < self._workers and join.rows is not None:  # None from a worker that failed before it read its rows
            self._same[worker] = join.same
            self._held[worker] = join.held
        if before or len(self._same) < self._workers:
            return
        counts = {worker: rows.get(worker, 0) for worker in self._same}
        if not any(counts.values()):
            raise DataError(
                "no worker has rows to train on: the data has none, or all of them are held back for validation. Look "
                "at the filter that they come from, and at validation."
            )
        labels = {self._same[worker] for worker, count in counts.items() if count}
        if len(labels) == 1 and None not in labels:
            warnings.warn(nothing_to_learn("label", sum(counts.values()), str(labels.pop())), stacklevel=2)
