"""What a GPU still owes its host: losses that are read later, and steps that the host is ahead by."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from thinwire.replicas.flaws import Flaw

READ_EVERY = 16
"""Losses read at once: reading each would stall the device."""
AHEAD = 2
"""Steps that the host may be ahead by. One keeps the device busy; each further one is a step by which replies that land
are late."""


class Owed:
    """Losses and steps that were asked of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[tuple[int, Tensor]] = []
        self._newest: float | None = None
        self._bad: tuple[int, float] | None = None
        self._ends: deque[Any] = deque()

    def loss(self, step: int, loss: Tensor) -> float:
        """Takes a step's loss in; returns the newest that was read."""
        self._losses.append((step, loss))
        if self._newest is None or len(self._losses) >= READ_EVERY:
            self._read()
        return self._newest or 0.0

    def bad(self, *, read: bool = False) -> tuple[int, float] | None:
        """The step and the loss found not to be finite since the last call; reads all losses first if asked."""
        if read:
            self._read()
        found, self._bad = self._bad, None
        return found

    def flaw(self, *, read: bool = True) -> Flaw | None:
        """The same as a flaw of a step."""
        found = self.bad(read=read)
        return None if found is None else Flaw("loss", 1, *found)

    def _read(self) -> None:
        owed, self._losses = self._losses, []
        for step, loss in owed:
            value = float(loss)
            if math.isfinite(value):
                self._newest = value
            else:
                self._bad = self._bad or (step, value)

    def step(self) -> None:
        """A step was asked for: waits for an earlier one to be done."""
        if self._device.type == "cuda":
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(torch.cuda.current_stream(self._device))
            self._ends.append(end)
            if len(self._ends) > AHEAD:
                self._ends.popleft().synchronize()

    def finish(self) -> None:
        """Waits for the newest step to be done."""
        if self._ends:
            self._ends[-1].synchronize()
