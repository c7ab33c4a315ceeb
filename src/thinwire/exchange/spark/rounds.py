"""Rounds that Spark sums: the same to a mesh as `thinwire.exchange.rounds.Rounds`, without any traffic of its own.

A worker that launches a round offers its contribution in its box and says so to the driver. When all have, the driver
runs a job that reads and sums them, and the mean comes with a later visit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.ports import COORDINATOR, Clock, Header
from thinwire.exchange.mesh import Mesh
from thinwire.exchange.round import Completed, Launch
from thinwire.exchange.rounds import Rounds
from thinwire.exchange.spark.link import Offer, SparkLink
from thinwire.parameters import Fragment

CODEC = "float32"


@dataclass
class _Open:
    fragment: Fragment
    launch: Launch | None = None
    started: float = 0.0
    done: bool = False
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)


class SparkRounds(Rounds):
    """One agent's part in all rounds of a generation."""

    def __init__(self, me: int, link: SparkLink, *, clock: Clock = time.monotonic) -> None:
        self._me, self._link, self._clock = me, link, clock
        self._mine: dict[str, _Open] = {}
        self._ended: list[str] = []
        self._completed = []
        self.generation = 0
        self.members = ()
        self.attempts = {}
        self.refused = 0

    def configure(
        self, generation: int, attempts: dict[int, int], landed: Callable[[str], bool] = lambda key: False
    ) -> list[Launch]:
        given_up = [o.launch for key, o in self._mine.items() if o.launch is not None and not landed(key)]
        for key in self._mine:
            self._link.offer(key, None)
        self._mine, self._ended, self._completed = {}, [], []
        self.generation, self.attempts, self.members = generation, dict(attempts), tuple(sorted(attempts))
        return given_up

    def launch(self, own: Launch) -> bool:
        if own.key in self._ended:
            return False
        entry = self._mine.setdefault(own.key, _Open(own.fragment))
        if entry.launch is not None:
            return False
        entry.fragment, entry.launch, entry.started = own.fragment, own, self._clock()
        counts = own.values is not None and own.weight > 0
        self._link.offer(own.key, Offer(self.generation, own.weight, own.values if counts else None))
        header = {"t": "launched", "g": self.generation, "a": self.attempts.get(self._me, 0), "r": own.key}
        self._link.send(
            COORDINATOR, header | {"s": list(own.fragment), "w": own.weight if counts else 0.0, "n": own.note}
        )
        return True

    def wanted(self) -> list[tuple[str, Fragment, str]]:
        return [(key, o.fragment, CODEC) for key, o in self._mine.items() if o.launch is None]

    @property
    def waiting(self) -> bool:
        return False  # nothing here depends on the time

    def waiting_for(self) -> dict[str, list[int]]:
        return {key: [] for key, entry in self._mine.items() if entry.launch is not None and not entry.done}

    def receive(self, sender: int, header: Header, payload: memoryview | None) -> None:
        key, start, stop = str(header["r"]), *(int(v) for v in header["s"])
        if int(header["g"]) != self.generation or key in self._ended:
            return
        entry = self._mine.setdefault(key, _Open(Fragment(start, stop)))
        if header["t"] == "sum" and entry.launch is not None and not entry.done:
            mean = _values(payload, entry.fragment.size)
            entry.done = True
            self._link.offer(key, None)
            notes = {int(worker): dict(note) for worker, note in header["n"].items()}
            taken, late = self._clock() - entry.started, tuple(int(w) for w in header.get("late", ()))
            size = 0 if payload is None else payload.nbytes
            self._completed.append(Completed(key, entry.fragment, mean, notes, taken, size, len(self.members), late))

    def tick(self) -> None:
        return

    def settle(self, key: str) -> None:
        if self._mine.pop(key, None) is not None:
            self._ended = [*self._ended[-127:], key]


class SparkMesh(Mesh):
    """A mesh whose rounds Spark sums."""

    def _make_rounds(self) -> Rounds:
        assert isinstance(self._link, SparkLink)
        return SparkRounds(self._seat.worker, self._link)


def _values(payload: memoryview | None, size: int) -> Tensor:
    if payload is None:
        return torch.zeros(size)
    if payload.nbytes != 4 * size:
        raise ValueError(f"{payload.nbytes} bytes where {4 * size} belong")
    return torch.frombuffer(payload, dtype=torch.float32)
