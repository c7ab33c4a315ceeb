"""Buffers that are published with a model, batch-norm's above all: the mean of all workers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker


class JointBuffers:
    """By key, those asked for, and those kept from when there was nobody to ask."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._kept: dict[str, dict[str, Tensor]] = {}
        """Of publications made alone: nobody who has come since has any to add."""

    def ask(self, key: str) -> None:
        """Contributes this worker's to the mean; alone they are the mean as they are now."""
        worker, buffers = self._worker, self._worker.replica.buffers
        worker.nonfinite.restore_buffers()
        if worker.alone:
            self._kept[key] = buffers.named(buffers.vector().clone(), buffers.counts())
        elif buffers.size and key not in worker.averaged:
            vector = buffers.vector()
            counts = bool(worker.batches.num_rows) and not buffers.count_not_finite(vector)
            weight = 1.0 if counts else 0.0  # who has no rows has made none of them
            worker.exchange.average(key, vector, weight, {"counts": buffers.counts()})

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The joint buffers, or None while they are on their way."""
        worker, buffers = self._worker, self._worker.replica.buffers
        if key in self._kept:
            return self._kept[key]
        averaged = worker.averaged.get(key)
        if averaged is None and buffers.size and not worker.alone:
            return None
        if averaged is None or worker.alone or averaged.empty or buffers.count_not_finite(averaged.mean):
            worker.nonfinite.restore_buffers()  # steps were made since they were asked for
            own: dict[str, Tensor] = buffers.named(buffers.vector(), buffers.counts())
            return own
        counted = [n["counts"] for n in averaged.notes.values() if "counts" in n]
        counts = [max(column) for column in zip(*counted, strict=True)]
        joint: dict[str, Tensor] = buffers.named(averaged.mean, counts or buffers.counts())
        return joint

    def drop(self, key: str) -> None:
        """They are no longer needed."""
        self._worker.averaged.pop(key, None)
        self._kept.pop(key, None)
