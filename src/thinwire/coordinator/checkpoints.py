"""Collects the reports of written parts, until each checkpoint is whole and committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, NamedTuple

from thinwire import events
from thinwire.coordinator.ports import Commit
from thinwire.errors import CheckpointError
from thinwire.protocol.clock import Clock
from thinwire.protocol.identifiers import FINAL, checkpoint_order
from thinwire.protocol.messages import Saved
from thinwire.protocol.transitions import Row, Transitions

MOST_AT_ONCE = 2
"""How many of the checkpoints that became whole during a commit are committed next; older ones are passed over."""


@unique
class CheckpointState(Enum):
    """How far a checkpoint has come at the coordinator."""

    REPORTED = "Some workers have written their parts."
    WHOLE = "All parts are written."
    COMMITTING = "The store commits the checkpoint, beside the run."
    COMMITTED = "The checkpoint can be resumed from. Reports about it and about older checkpoints are dropped."
    FAILED = "The store could not commit the checkpoint, or not in time."
    REFUSED = "The checkpoint is not committed, because its parameters may be damaged."
    PASSED_OVER = "The checkpoint is not committed, because newer ones became whole while the store was busy."


@unique
class CheckpointEvent(Enum):
    """What moves a checkpoint on."""

    REPORT = "a worker has written its part"
    COMPLETE = "the last member has written its part, and each part of the joint model is there"
    REFUSE = "at no worker were the last loss and gradient finite, and the run has not ended"
    BEGIN = "the store is free"
    PASS_OVER = "the store is free, and at least two newer checkpoints are whole"
    SUCCEED = "the store has committed the checkpoint"
    FAIL = "the store reports an error, or the run ends and the patience for its store is over"


S, E = CheckpointState, CheckpointEvent
TRANSITIONS = Transitions(
    S.REPORTED,
    [
        Row((S.REPORTED,), E.REPORT, S.REPORTED),
        Row((S.REPORTED,), E.COMPLETE, S.WHOLE),
        Row((S.WHOLE,), E.REFUSE, S.REFUSED),
        Row((S.WHOLE,), E.BEGIN, S.COMMITTING),
        Row((S.WHOLE,), E.PASS_OVER, S.PASSED_OVER),
        Row((S.COMMITTING,), E.SUCCEED, S.COMMITTED),
        Row((S.COMMITTING,), E.FAIL, S.FAILED),
    ],
)


class Whole(NamedTuple):
    """A checkpoint whose parts are all written."""

    name: str
    step: int
    parts: list[dict[str, Any]]


@dataclass
class _Checkpoint:
    """Reports of one checkpoint, and its state."""

    reports: dict[int, Saved] = field(default_factory=dict)
    state: CheckpointState = TRANSITIONS.initial


class CheckpointCommits:
    """Reports of parts by checkpoint, and the commits under way. The run goes on while a store commits."""

    def __init__(self, group_size: int, commit: Commit | None, clock: Clock) -> None:
        self._group_size, self._commit, self._clock = group_size, commit, clock
        self._known: dict[str, _Checkpoint] = {}
        self._begun: deque[tuple[Whole, Future[int]]] = deque()
        self._newest: str | None = None
        self._stopped = False
        self._refused: list[events.Event] = []

    def _move(self, name: str, cause: CheckpointEvent) -> None:
        self._known[name].state = TRANSITIONS.after(self._known[name].state, cause)

    def hear(self, worker: int, saved: Saved) -> None:
        """Notes that a worker has written its parts; parts older than the newest checkpoint are already deleted."""
        if checkpoint_order(saved.name) <= checkpoint_order(self._newest or ""):
            return
        known = self._known.setdefault(saved.name, _Checkpoint())
        if TRANSITIONS.allows(known.state, CheckpointEvent.REPORT):
            self._move(saved.name, CheckpointEvent.REPORT)
            known.reports[worker] = saved

    def whole(self, needed: set[int], newest: str | None) -> Iterator[Whole]:
        """Checkpoints that are whole now, in their order, without those older than the newest committed checkpoint."""
        reported = [name for name, known in self._known.items() if known.state is CheckpointState.REPORTED]
        for name in sorted(reported, key=checkpoint_order):
            reports = self._known[name].reports
            parts = {p["name"]: p for r in reports.values() for p in r.parts}
            joint = [part for part in parts if str(part).startswith("joint")]
            if (
                checkpoint_order(name) <= checkpoint_order(newest or "")
                or not needed <= set(reports)
                or len(joint) < self._group_size
            ):
                continue
            self._move(name, CheckpointEvent.COMPLETE)
            if all(r.fails for r in reports.values()) and not name.endswith(FINAL):
                self._move(name, CheckpointEvent.REFUSE)
                reason = "at no worker had the last steps a loss and a gradient that are finite"
                self._refused.append(events.CheckpointFailed(name=name, reason=reason))
                continue
            newest = name
            yield Whole(name, max(r.steps for r in reports.values()), [*parts.values()])

    def begin(self, needed: set[int], meta: Callable[[], dict[str, Any]]) -> None:
        """Begins to commit the checkpoints that are whole now."""
        if self._commit is None or self._begun or self._stopped:  # a slow store must not accumulate commits
            return
        found = [*self.whole(needed, self._newest)]
        for whole in found[:-MOST_AT_ONCE]:
            self._move(whole.name, CheckpointEvent.PASS_OVER)
        for whole in found[-MOST_AT_ONCE:]:
            self._move(whole.name, CheckpointEvent.BEGIN)
            self._begun.append((whole, self._commit(whole.name, whole.step, whole.parts, meta())))

    def stop(self) -> None:
        """Begins no further commit; commits under way go on."""
        self._stopped = True

    def ended(self, patience_s: float = 0.0) -> Iterator[events.Event]:
        """Results of the commits begun, in their order. With a patience, a commit that takes longer has failed."""
        until = self._clock() + patience_s
        refused, self._refused = self._refused, []
        yield from refused
        while self._begun and (patience_s or self._begun[0][1].done()):
            whole, commit = self._begun[0]
            try:
                size_bytes = commit.result(timeout=max(0.0, until - self._clock()))
            except CheckpointError as error:
                became = self._failed(whole, str(error))
            except LateError:
                commit.cancel()
                became = self._failed(whole, f"it was not committed after {patience_s:.0f} s: the store is slow")
            else:
                self._move(whole.name, CheckpointEvent.SUCCEED)
                self._supersede(whole.name)
                became = events.CheckpointSaved(name=whole.name, steps=whole.step, size_bytes=size_bytes)
            self._begun.popleft()
            yield became

    def _failed(self, whole: Whole, reason: str) -> events.Event:
        self._move(whole.name, CheckpointEvent.FAIL)
        return events.CheckpointFailed(name=whole.name, reason=reason)

    def _supersede(self, newest: str) -> None:
        """Forgets the reports of a committed checkpoint and of all older ones."""
        self._newest = newest
        order = checkpoint_order(newest)
        self._known = {name: known for name, known in self._known.items() if checkpoint_order(name) > order}
