"""Buffers that are published with a model, batch-norm's above all: the mean of all workers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from thinwire.exchange.ports import PublicationsPort
from thinwire.exchange.signals import Averaged
from thinwire.parameters import Buffers
from thinwire.worker.generation import Generation


@final
class JointBuffers:
    """The buffers of publications, by key.

    Args:
        restore: takes values out of the buffers that are not finite.
        has_rows: whether this worker has made any of them.
    """

    def __init__(
        self,
        buffers: Buffers,
        generation: Generation,
        *,
        exchange: PublicationsPort,
        means: dict[str, Averaged],
        restore: Callable[[], None],
        has_rows: bool,
    ) -> None:
        self._buffers, self._generation, self._exchange, self._means = buffers, generation, exchange, means
        self._restore, self._has_rows = restore, has_rows
        self._kept: dict[str, dict[str, Tensor]] = {}
        """Of publications made without other workers: workers that have come since contribute nothing to them."""

    def ask(self, key: str) -> None:
        """Contributes this worker's buffers to the mean; without other workers they are the mean as they are now."""
        buffers = self._buffers
        self._restore()
        if self._generation.alone:
            self._kept[key] = buffers.named(buffers.vector().clone(), buffers.counts())
        elif buffers.size and key not in self._means:
            vector = buffers.vector()
            counts = self._has_rows and not buffers.count_not_finite(vector)
            weight = 1.0 if counts else 0.0
            self._exchange.average(key, vector, weight, {"counts": buffers.counts()})

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The joint buffers, or None while they are on their way."""
        buffers, alone = self._buffers, self._generation.alone
        if key in self._kept:
            return self._kept[key]
        averaged = self._means.get(key)
        if averaged is None and buffers.size and not alone:
            return None
        if averaged is None or alone or averaged.empty or buffers.count_not_finite(averaged.mean):
            self._restore()  # steps were made since the mean was asked for
            own: dict[str, Tensor] = buffers.named(buffers.vector(), buffers.counts())
            return own
        counted = [n["counts"] for n in averaged.notes.values() if "counts" in n]
        counts = [max(column) for column in zip(*counted, strict=True)]
        joint: dict[str, Tensor] = buffers.named(averaged.mean, counts or buffers.counts())
        return joint

    def drop(self, key: str) -> None:
        """They are no longer needed."""
        self._means.pop(key, None)
        self._kept.pop(key, None)
