"""A model as a ledger: each step of each worker adds a one to a place of its own.

With a learning rate of 1 the joint model shows which steps it contains, and how often.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.placement import Crew, GroupReplica
from thinwire.placement.portions import Portion
from thinwire.placement.replica import Part
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire_lab.schedules.invariants import InvariantChecker

PLACES = 512


class Ledger(nn.Module):
    """The places, once for each part of a replica; `place` is the one to which the next step adds."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(PLACES * parts))
        self.register_buffer("seen", torch.zeros(1))
        self.place: int | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.place is None or not self.training:
            return self.values.sum() * 0.0
        return -self.values[self.place]


def loss(output: Tensor, label: Tensor) -> Tensor:
    """The model's output itself, without regard to the label."""
    return output


class StepTimes:
    """Durations of one worker's steps, drawn from the seed."""

    def __init__(self, checker: InvariantChecker, spec: TrainSpec, step_s: float, spread: float) -> None:
        self._time, self._step_s, self._spread = checker.time, step_s, spread
        self._random = random.Random(f"{spec.seed} {checker.owner()}")

    def step(self) -> None:
        """Waits for the time of a step."""
        factor = math.exp(self._random.gauss(0.0, self._spread)) if self._spread else 1.0
        self._time.work(self._step_s * factor)


class LedgerReplica(TorchReplica):
    """A replica whose steps take virtual time and mark their places."""

    def __init__(
        self, checker: InvariantChecker, model: Any, spec: TrainSpec, worker: int, *, step_s: float, spread: float
    ):
        super().__init__(model, spec, worker)
        self._checker, self._owner = checker, checker.owner()
        self._times = StepTimes(checker, spec, step_s, spread)

    def gradient(self, batch: Any) -> float:
        self._times.step()
        assert isinstance(self.module, Ledger)
        self.module.place = self._checker.stepped(self._owner, tuple(batch.position), batch.num_rows)
        return super().gradient(batch)


class LedgerPart(GroupReplica):
    """A group member's part of such a replica: a step of the group marks the same place in every part."""

    def __init__(
        self, checker: InvariantChecker, spec: TrainSpec, worker: int, crew: Crew, *, step_s: float, spread: float
    ):
        self.crew, self.device = crew, torch.device("cpu")
        self.module = ledger = Ledger()
        self._checker, self._owner = checker, checker.owner()
        self._times = StepTimes(checker, spec, step_s, spread)
        self._equip(spec, worker, Part({"values": ledger.values}, dict(ledger.named_buffers())), ledger)

    def gradient(self, batch: Any) -> float:
        if not self._met:
            self.meet(batch)
        self._met = False
        self._times.step()
        place: int | None = -1
        if batch is not self.spare:
            place = self._checker.stepped(self._owner, tuple(batch.position), batch.num_rows)
        # all members mark the place of a member with rows
        told = self.crew.tell([-1.0 if place is None else float(place)])
        first = int(max((each[0] for each in told), default=-1.0))
        assert isinstance(self.module, Ledger)
        gradient = torch.zeros_like(self.module.values)
        if first >= 0:
            gradient[first] = -1.0
        self.module.values.grad = gradient
        return 0.0

    def _forward(self, batch: Any) -> Tensor:
        return torch.zeros(())

    def _portions(self) -> Iterator[tuple[Portion, str]]:
        part, size = self.crew.part, self.crew.size
        yield Portion("values", (PLACES * size,), None, ((part * PLACES, (part + 1) * PLACES),)), "values"
        if part == 0:
            yield Portion("seen", (1,), None, ((0, 1),)), "seen"
