"""How long simulated steps take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from thinwire.rules.period import Link

FLOAT_BYTES = 4


class StepTimes:
    """Draws each worker's step times, one after the other; the same ones for the same seed.

    Args:
        step_s: what a step takes; None leaves it to what is measured here.
        ratio: instead, in how many steps the whole model crosses the link there and back.
        link: the link that `ratio` speaks of.
        spread: standard deviation of a step's time over its mean (log-normal).
        slow: factors by worker.
        contention: how much longer a step takes while the worker's machine sends or receives much.
        busy: whether it does.
        seed: of what is drawn.
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
        """From here on it is known: by the ratio and the number of parameters, or by what a step takes here."""
        told = self.expected_s(parameters)
        self.step_s = measure() if told is None else told

    def expected_s(self, parameters: int) -> float | None:
        """Seconds of a step of a network with so many parameters, where they are told."""
        if self.step_s is not None or self._ratio is None:
            return self.step_s
        return 2 * FLOAT_BYTES * parameters / self._link.bytes_per_s / self._ratio

    def draw(self, worker: int) -> float:
        """The time of a worker's next step."""
        assert self.step_s is not None
        seconds = self.step_s * self._slow.get(worker, 1.0)
        if self._contention and self._busy(worker):
            seconds *= 1.0 + self._contention
        if self._sigma:
            made = self._drawn.setdefault(worker, random.Random(f"{self._seed}:{worker}"))
            seconds *= made.lognormvariate(-(self._sigma**2) / 2, self._sigma)
        return seconds
