"""A model that keeps accounts: each step of each worker adds a one to a place of its own.

With a learning rate of 1 the joint model can be read as a ledger: which steps are in it, and how often.
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
    """The places, once for each part of a replica; `place` is the one that the next step adds to."""

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
    """What the ledger says, whatever the label."""
    return output


class StepTimes:
    """What the steps of one worker take, drawn by the seed."""

    def __init__(self, witness: InvariantChecker, spec: TrainSpec, step_s: float, spread: float) -> None:
        self._time, self._step_s, self._spread = witness.time, step_s, spread
        self._random = random.Random(f"{spec.seed} {witness.owner()}")

    def step(self) -> None:
        """Lets the time of a step pass."""
        factor = math.exp(self._random.gauss(0.0, self._spread)) if self._spread else 1.0
        self._time.work(self._step_s * factor)


class TokenReplica(TorchReplica):
    """A replica whose steps take virtual time and leave a mark."""

    def __init__(
        self, witness: InvariantChecker, model: Any, spec: TrainSpec, worker: int, *, step_s: float, spread: float
    ):
        super().__init__(model, spec, worker)
        self._witness, self._owner = witness, witness.owner()
        self._times = StepTimes(witness, spec, step_s, spread)

    def gradient(self, batch: Any) -> float:
        self._times.step()
        assert isinstance(self.module, Ledger)
        self.module.place = self._witness.stepped(self._owner, tuple(batch.position), batch.num_rows)
        return super().gradient(batch)


class TokenPart(GroupReplica):
    """A member's part of such a replica: a step of the group leaves the same mark in every part."""

    def __init__(
        self, witness: InvariantChecker, spec: TrainSpec, worker: int, crew: Crew, *, step_s: float, spread: float
    ):
        self.crew, self.device = crew, torch.device("cpu")
        self.module = ledger = Ledger()
        self._witness, self._owner = witness, witness.owner()
        self._times = StepTimes(witness, spec, step_s, spread)
        self._equip(spec, worker, Part({"values": ledger.values}, dict(ledger.named_buffers())), ledger)

    def gradient(self, batch: Any) -> float:
        if not self._met:
            self.meet(batch)
        self._met = False
        self._times.step()
        place: int | None = -1
        if batch is not self.spare:
            place = self._witness.stepped(self._owner, tuple(batch.position), batch.num_rows)
        told = self.crew.tell([-1.0 if place is None else float(place)])  # one mark for all, that of a member with rows
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
