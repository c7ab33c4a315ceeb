"""Publications of the joint model on servers: all workers come to hold the same copy of it, or none does.

::

    lead     ─ mark ▶  every worker  those that host tuples copy them as they are now
    host     ─ page ▶  every worker
    worker   ─ have ▶  lead          it has all pages
    lead     ─ go   ▶  every worker  all have them: each takes the publication up

Where a generation ends in between: if anybody heard "go", everyone has all pages and takes the publication up as the
next one begins; if nobody did, nobody has taken it up, and it is announced again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.table.plan import Layout
from thinwire.protocol.clock import Clock
from thinwire.protocol.messages import Go, Have, Mark

Name = tuple[int, int]
"""The generation in which a publication was announced, and its number there."""
Tell = Callable[..., None]
"""Sends a message of a kind, with these fields, to a worker."""
Emit = Callable[[Name, dict[str, Any], Tensor, dict[int, list[Any]]], None]
AGAIN_S = 20.0
"""After so long what was asked for is asked for again; a publication that not all have, under another name."""
MOST_OPEN = 8


def name_of(value: Sequence[int]) -> Name:
    """A publication's name, as it is on the wire."""
    generation, number = value
    return int(generation), int(number)


@dataclass
class _Pages:
    """One publication, as it comes together."""

    model: Tensor
    missing: set[int]
    note: dict[str, Any] | None = None
    """None until the mark has come; pages may be faster."""
    tuples: dict[int, list[Any]] = field(default_factory=dict)
    """Whole tuples by key, where this worker is to save them."""

    @property
    def complete(self) -> bool:
        return not self.missing and self.note is not None

    def is_again(self, later: _Pages) -> bool:
        """Whether the later one is this, announced again because not all had it: then only that one counts."""
        return self.note is not None and "publish" in self.note and later.note == self.note


class Publications:
    """One worker's part in publications; `tell` reaches any member, this worker too."""

    def __init__(self, layout: Layout, size: int, tell: Tell, emit: Emit, clock: Clock) -> None:
        self._layout, self._size, self._tell, self._emit, self._clock = layout, size, tell, emit, clock
        self._open: dict[Name, _Pages] = {}
        self._asked: deque[dict[str, Any]] = deque()
        self._announced: tuple[Name, dict[str, Any], set[int]] | None = None
        self._count, self._announced_at = 0, 0.0
        self.went: Name = (0, 0)
        """The last publication that was taken up here."""
        self.missed: list[dict[str, Any]] = []
        """What was announced here and published where this worker was not."""
        self._generation = 0
        self._members: tuple[int, ...] = ()

    def ask(self, note: dict[str, Any]) -> None:
        """The lead wants to publish; one at a time."""
        self._asked.append(note)
        self._announce()

    def _announce(self) -> None:
        if self._announced is None and self._asked:
            self._count += 1
            name, note = (self._generation, self._count), self._asked.popleft()
            self._announced, self._announced_at = (name, note, set()), self._clock()
            for member in self._members:
                self._tell(member, Mark, name=name, note=note)

    def marked(self, name: Name, note: dict[str, Any]) -> None:
        """The lead has announced a publication."""
        found = self._pages(name)
        if found is not None:
            found.note = note
            self._look(name, found)

    def page(self, name: Name, key: int, values: list[Any], *, whole: bool) -> None:
        """One tuple has come: whole, for whom is to save it, or its parameters only."""
        found = self._pages(name)
        if found is None or key not in found.missing:
            return
        target = self._layout.fragments[key].of(found.model)
        if not values or not isinstance(values[0], Tensor) or values[0].shape != target.shape:
            raise ValueError(f"page {key} does not fit")
        target.copy_(values[0])
        if whole:
            found.tuples[key] = values
        found.missing.discard(key)
        self._look(name, found)

    def _pages(self, name: Name) -> _Pages | None:
        if name <= self.went or (name not in self._open and len(self._open) >= MOST_OPEN):
            return None
        if name not in self._open:
            self._open[name] = _Pages(torch.empty(self._size), set(range(len(self._layout.fragments))))
        return self._open[name]

    def _look(self, name: Name, found: _Pages) -> None:
        if found.complete:
            self._tell(self._members[0], Have, name=name)

    def have(self, worker: int, name: Name) -> None:
        """A worker has all pages."""
        if self._announced is None or self._announced[0] != name:
            return
        self._announced[2].add(worker)
        if self._announced[2] >= set(self._members):
            self._announced = None
            for member in self._members:
                self._tell(member, Go, name=name)
            self._announce()

    def go(self, name: Name) -> None:
        """All have it, and what was announced before: each is taken up, in their order, where it was not yet."""
        ready = [(other, self._open.pop(other)) for other in sorted(other for other in self._open if other <= name)]
        ready = [(other, found) for other, found in ready if found.complete and other > self.went]
        for index, (earlier, found) in enumerate(ready):
            assert found.note is not None
            if not any(found.is_again(later) for _, later in ready[index + 1 :]):
                self._emit(earlier, found.note, found.model, found.tuples)

    def tick(self, now: float) -> None:
        """Announces again what somebody has been waiting for too long."""
        if self._announced is not None and now - self._announced_at > AGAIN_S:
            self._asked.appendleft(self._announced[1])
            self._announced = None
            self._announce()

    def begin(self, generation: int, members: tuple[int, ...], me: int, went: Name) -> None:
        """A generation has begun; somebody in it had taken up publications until `went`."""
        self.go(went)
        again = [] if self._announced is None else [self._announced[1]]
        if self._announced is not None and self._announced[0] <= went:
            self.missed, again = again, []  # unless it was taken up here, too
        self._open, self._announced, self._count = {}, None, 0
        self._generation, self._members = generation, members
        if me == members[0]:
            self._asked.extendleft(again)
            self._announce()
        else:
            self._asked.clear()
