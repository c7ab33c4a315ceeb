"""Durations of simulated steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from thinwire.rules.period import Link

FLOAT_BYTES = 4


class StepTimes:
    """Draws each worker's step times in order; the same seed draws the same times.

    Args:
        step_s: duration of a step; None leaves it to a measurement.
        ratio: instead, the number of steps in whose time the whole model crosses the link and back.
        link: the link for `ratio`.
        spread: standard deviation of a step's time over its mean (log-normal).
        slow: factors by worker.
        contention: relative increase of a step's time while the worker's link is busy.
        busy: whether a worker's link is busy.
        seed: seed of the drawn times.
    """

    def __init__(
        self,
        *,
        step_s: float | None,
        ratio: float | None,
        link: Link,
        spread: float,
        slow: Mapping[int, float],
        contention: float,
        busy: Callable[[int], bool],
        seed: int,
    ) -> None:
        self.step_s, self._ratio, self._link = step_s, ratio, link
        self._slow, self._contention, self._busy, self._seed = dict(slow), contention, busy, seed
        self._sigma = math.sqrt(math.log1p(spread * spread))
        self._drawn: dict[int, random.Random] = {}

    @property
    def known(self) -> bool:
        return self.step_s is not None

    def settle(self, parameters: int, measure: Callable[[], float]) -> None:
        """Fixes the duration of a step: by the ratio and the number of parameters, or by a measurement."""
        told = self.expected_s(parameters)
        self.step_s = measure() if told is None else told

    def expected_s(self, parameters: int) -> float | None:
        """Seconds of a step of a network with this number of parameters, where given."""
        if self.step_s is not None or self._ratio is None:
            return self.step_s
        return 2 * FLOAT_BYTES * parameters / self._link.bytes_per_s / self._ratio

    def draw(self, worker: int) -> float:
        """The duration of a worker's next step."""
        assert self.step_s is not None
        seconds = self.step_s * self._slow.get(worker, 1.0)
        if self._contention and self._busy(worker):
            seconds *= 1.0 + self._contention
        if self._sigma:
            made = self._drawn.setdefault(worker, random.Random(f"{self._seed}:{worker}"))
            seconds *= made.lognormvariate(-(self._sigma**2) / 2, self._sigma)
        return seconds
