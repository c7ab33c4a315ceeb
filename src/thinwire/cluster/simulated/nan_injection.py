"""Injects values that are not finite, as an overflow would, into the steps of simulated workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from thinwire.cluster.simulated.fibers import VirtualTime

NAN, INFINITY = float("nan"), float("inf")


class NanFault(NamedTuple):
    """Affects a share of a worker's steps that end between two moments."""

    worker: int
    since_s: float
    until_s: float
    share: float


class NanInjection:
    """Injects the values, drawn from the seed."""

    def __init__(self, time: VirtualTime, faults: Sequence[NanFault], seed: int) -> None:
        self._time, self._faults = time, faults
        self._random = random.Random(f"flaws {seed}")

    def around(self, worker: int, replica: Any) -> Any:
        """A replica whose affected steps have values that are not finite."""
        faults = [fault for fault in self._faults if fault.worker == worker]
        gradient = replica.gradient
        if not faults:
            return replica

        def flawed(batch: Any) -> float:
            loss: float = gradient(batch)
            now = self._time.now()
            wrong = [s for s in faults if s.since_s <= now < s.until_s and self._random.random() < s.share]
            return self._spoil(replica, loss) if wrong else loss

        replica.gradient = flawed
        return replica

    def _spoil(self, replica: Any, loss: float) -> float:
        what = self._random.random()
        if what < 0.2:
            return NAN
        if what < 0.3:  # as if the update itself overflowed
            with torch.no_grad():
                replica.vector[self._random.randrange(replica.vector.numel())] = INFINITY
            return loss
        made = [p.grad for p in replica.parameters.tensors if p.grad is not None]
        if made:
            values = self._random.choice(made).view(-1)
            values[self._random.randrange(values.numel())] = self._random.choice((NAN, INFINITY, -INFINITY))
        return loss
