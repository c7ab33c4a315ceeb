"""A model that keeps accounts: each step of each worker adds a one to a place of its own.

With a learning rate of 1 the joint model can be read as a ledger: which steps are in it, and how often.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.replicas import TorchReplica, TrainSpec
from thinwire_lab.schedules.witness import Witness

PLACES = 512


class Ledger(nn.Module):
    """The places; `place` is the one that the next step adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(PLACES))
        self.register_buffer("seen", torch.zeros(1))
        self.place: int | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.place is None or not self.training:
            return self.values.sum() * 0.0
        return -self.values[self.place]


def loss(output: Tensor, label: Tensor) -> Tensor:
    """What the ledger says, whatever the label."""
    return output


class TokenReplica(TorchReplica):
    """A replica whose steps take virtual time and leave a mark."""

    def __init__(self, witness: Witness, model: Any, spec: TrainSpec, worker: int, *, step_s: float, spread: float):
        super().__init__(model, spec, worker)
        self._witness, self._owner = witness, witness.owner()
        self._step_s, self._spread = step_s, spread
        self._random = random.Random(f"{spec.seed} {self._owner}")

    def gradient(self, batch: Any) -> float:
        factor = math.exp(self._random.gauss(0.0, self._spread)) if self._spread else 1.0
        self._witness.time.work(self._step_s * factor)
        assert isinstance(self.module, Ledger)
        self.module.place = self._witness.stepped(self._owner, tuple(batch.position), batch.num_rows)
        return super().gradient(batch)
