"""Checkpoints on their way: parts that workers have written, until each checkpoint is whole and committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import Any, NamedTuple

from thinwire import events
from thinwire.coordinator.ports import Commit
from thinwire.errors import CheckpointError
from thinwire.protocol.clock import Clock
from thinwire.protocol.identifiers import FINAL, checkpoint_order
from thinwire.protocol.messages import Saved

MOST_AT_ONCE = 2
"""Of those that became whole while others were being committed, the newest: older ones would be cleared away."""


class Whole(NamedTuple):
    """A checkpoint all of whose parts are written."""

    name: str
    step: int
    parts: list[dict[str, Any]]


class CheckpointCommits:
    """Reports of parts, by checkpoint, and what is being committed: a store may take its time, and the run goes on."""

    def __init__(self, group_size: int, commit: Commit | None, clock: Clock) -> None:
        self._group_size, self._commit, self._clock = group_size, commit, clock
        self._reports: dict[str, dict[int, Saved]] = {}
        self._done: set[str] = set()
        self._begun: deque[tuple[Whole, Future[int]]] = deque()
        self._newest: str | None = None
        self._stopped = False
        self._refused: list[events.Event] = []

    def hear(self, worker: int, saved: Saved) -> None:
        """A worker has written its parts; of a checkpoint older than the newest they are gone already."""
        if checkpoint_order(saved.name) > checkpoint_order(self._newest or ""):
            self._reports.setdefault(saved.name, {})[worker] = saved

    def whole(self, needed: set[int], newest: str | None) -> Iterator[Whole]:
        """Checkpoints that are whole now; one older than the newest is none any more: that one's commit cleared it."""
        for name in sorted(set(self._reports) - self._done, key=checkpoint_order):
            reports = self._reports[name]
            parts = {p["name"]: p for r in reports.values() for p in r.parts}
            joint = [part for part in parts if str(part).startswith("joint")]
            if (
                checkpoint_order(name) <= checkpoint_order(newest or "")
                or not needed <= set(reports)
                or len(joint) < self._group_size
            ):
                continue
            self._done.add(name)
            if all(r.fails for r in reports.values()) and not name.endswith(FINAL):
                reason = "at no worker had the last steps a loss and a gradient that are finite"
                self._refused.append(events.CheckpointFailed(name=name, reason=reason))
                continue
            newest = name
            yield Whole(name, max(r.steps for r in reports.values()), [*parts.values()])

    def begin(self, needed: set[int], meta: Callable[[], dict[str, Any]]) -> None:
        """Begins to commit those that are whole now."""
        if self._commit is None or self._begun or self._stopped:  # a slow store is not to have ever more of them
            return
        for whole in [*self.whole(needed, self._newest)][-MOST_AT_ONCE:]:
            self._begun.append((whole, self._commit(whole.name, whole.step, whole.parts, meta())))

    def stop(self) -> None:
        """Nothing is committed any more but what was begun."""
        self._stopped = True

    def ended(self, patience_s: float = 0.0) -> Iterator[events.Event]:
        """What became of those begun, in their order; those not done after so long have failed, if it is not 0."""
        until = self._clock() + patience_s
        refused, self._refused = self._refused, []
        yield from refused
        while self._begun and (patience_s or self._begun[0][1].done()):
            whole, commit = self._begun[0]
            try:
                size_bytes = commit.result(timeout=max(0.0, until - self._clock()))
            except CheckpointError as error:
                became: events.Event = events.CheckpointFailed(name=whole.name, reason=str(error))
            except LateError:
                commit.cancel()
                slow = f"it was not committed after {patience_s:.0f} s: the store is slow"
                became = events.CheckpointFailed(name=whole.name, reason=slow)
            else:
                self._supersede(whole.name)
                became = events.CheckpointSaved(name=whole.name, steps=whole.step, size_bytes=size_bytes)
            self._begun.popleft()
            yield became

    def _supersede(self, newest: str) -> None:
        """A checkpoint is committed: what was heard of it and of older ones is of no use any more."""
        self._newest = newest
        self._reports = {
            n: reports for n, reports in self._reports.items() if checkpoint_order(n) > checkpoint_order(newest)
        }
        self._done = {name for name in self._done if checkpoint_order(name) > checkpoint_order(newest)}
