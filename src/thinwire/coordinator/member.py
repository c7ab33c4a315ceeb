"""A worker's membership as a state machine, from its first join until it is lost, replaced, retired or has left.

`Roster` is the only owner of these states; membership and attendance ask it for each transition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from thinwire.protocol.messages import Join
from thinwire.protocol.transitions import Row, Transitions


@unique
class MemberState(Enum):
    """Where a worker stands between joining a run and leaving it."""

    ABSENT = "The worker has never joined."
    JOINED = "The worker has a seat and has not been called to a generation since it joined."
    CALLED = "The coordinator has sent `prepare`; the worker has not answered yet."
    PREPARED = "The worker has answered the newest `prepare` and merges nothing until `commit` reaches it."
    COMMITTED = "The worker is a member of the newest generation."
    LOST = "The worker's seat was given up; whether a replacement will come is about to be decided."
    AWAITED = "The worker was lost, and a replacement may still join."
    UNREPLACED = "The worker was lost, and no replacement will be started."
    RETIRED = "The worker had done its rows and left, so that a worker without a slot can have its slot."
    LEFT = "The worker needs no seat any more: it said good-bye, or the run ends without it and all its rows are done."


@unique
class MemberEvent(Enum):
    """What changes a worker's membership."""

    JOIN = "the worker, or a newer attempt of it, joins"
    CALL = "the coordinator sends `prepare`"
    ANSWER = "the worker answers the newest `prepare`"
    COMMIT = "the last answer is in, and the coordinator sends `commit`"
    LOSE = "its connection or process ends, it is silent for too long, or a newer attempt takes its place"
    EXPECT = "a replacement was started, or Spark runs the task again"
    GIVE_UP = "no replacement will be started"
    DISMISS = "the run ends without the worker before its rows are done"
    RETIRE = "another worker waits for the slot"
    LEAVE = "it had said good-bye, or the run ends without it and its rows are done"


S, E = MemberState, MemberEvent
SEATED = (S.JOINED, S.CALLED, S.PREPARED, S.COMMITTED)
"""States of a worker that has a seat."""
MISSING = (S.LOST, S.AWAITED, S.UNREPLACED)
"""States of a worker that was lost and has not come back."""
TRANSITIONS = Transitions(
    S.ABSENT,
    [
        Row((S.ABSENT, *MISSING, S.RETIRED, S.LEFT, *SEATED), E.JOIN, S.JOINED),
        Row(SEATED, E.CALL, S.CALLED),
        Row((S.CALLED,), E.ANSWER, S.PREPARED),
        Row((S.PREPARED,), E.COMMIT, S.COMMITTED),
        Row((*SEATED, S.ABSENT, *MISSING, S.RETIRED, S.LEFT), E.LOSE, S.LOST),
        Row((S.LOST,), E.EXPECT, S.AWAITED),
        Row((S.LOST,), E.GIVE_UP, S.UNREPLACED),
        Row(SEATED, E.DISMISS, S.AWAITED),
        Row(SEATED, E.RETIRE, S.RETIRED),
        Row((S.LOST, *SEATED), E.LEAVE, S.LEFT),
    ],
)


@dataclass
class Seat:
    """What the coordinator knows of a worker that is in the run or about to enter it."""

    worker: int
    attempt: int
    address: str
    host: str
    pid: int
    meets: str | None
    """Address where the members of its group meet, if this worker is the first of a group."""
    last_seen: float
    again: bool = False
    """Whether it replaces a worker that was lost."""
    landed: int = 0
    fresh: bool = True
    """Whether it has yet to take the joint state over."""
    blank: bool = True
    """Whether it has not held any joint state in this run, not even an older one."""
    since: int = 0
    """The newest generation whose joint state it held; 0 for none."""
    digest: str = ""
    table: dict[str, Any] = field(default_factory=dict)
    """Its last answer about the tuples of a table; the commit passes this answer on to all members."""
    called_at: float | None = None
    """Time at which the oldest unanswered `prepare` was sent."""
    suspect_since: float | None = None
    """Time at which its connection broke; None once it is heard again."""
    stalled_since: float | None = None
    """Time since which it waits for rounds without any of them landing."""
    waits_for: dict[str, list[int]] = field(default_factory=dict)
    """Its open rounds, and for each the workers from which it lacks a message."""
    progress: dict[str, Any] = field(default_factory=dict)


class Roster:
    """The membership state of every worker, its seat, and what is kept of its earlier attempts."""

    def __init__(self, workers: int, helpers: int = 0) -> None:
        self.workers, self.helpers = workers, helpers
        self.seats: dict[int, Seat] = {}
        self._states: dict[int, MemberState] = {}
        self.attempts: dict[int, int] = {}
        """The newest attempt seen of every worker; older attempts are refused."""
        self.first_attempts: dict[int, int] = {}
        self.standing: dict[int, int] = {}
        """Newer attempts that wait until the older attempt of their worker can be spared; each repeats its join."""
        self.retired: set[tuple[int, int]] = set()
        """Workers and attempts that have retired."""
        self.rows: dict[int, int] = {}
        """Training rows of every worker that has ever joined."""
        self.remembered: dict[int, dict[str, Any]] = {}
        """Last progress of every worker, from which its successor goes on."""
        self.lost_at: dict[int, float] = {}
        """Time at which each missing worker was lost."""

    def state(self, worker: int) -> MemberState:
        """The state of a worker."""
        return self._states.get(worker, TRANSITIONS.initial)

    def _move(self, worker: int, cause: MemberEvent) -> None:
        self._states[worker] = TRANSITIONS.after(self.state(worker), cause)

    # -- joins ------------------------------------------------------------------------------------------------------

    def join(self, join: Join, worker: int, now: float) -> Seat:
        """Gives an attempt a new seat."""
        again = self.state(worker) in MISSING
        self._move(worker, MemberEvent.JOIN)
        self.lost_at.pop(worker, None)
        self.standing.pop(worker, None)
        self.attempts[worker] = join.attempt
        self.first_attempts.setdefault(worker, join.attempt)
        self.rows[worker] = join.rows or 0
        self.seats[worker] = Seat(
            worker=worker,
            attempt=join.attempt,
            address=join.address,
            host=join.host,
            pid=join.pid,
            meets=join.meets,
            last_seen=now,
            again=again,
        )
        return self.seats[worker]

    def call(self, now: float) -> None:
        """Notes that every worker with a seat is sent `prepare`."""
        for seat in self.seats.values():
            self._move(seat.worker, MemberEvent.CALL)
            seat.called_at = now if seat.called_at is None else seat.called_at

    def answer(self, worker: int) -> None:
        """Notes a worker's answer to the newest `prepare`; repeated answers and answers before a new join are void."""
        if TRANSITIONS.allows(self.state(worker), MemberEvent.ANSWER):
            self._move(worker, MemberEvent.ANSWER)
        self.seats[worker].called_at = None

    def commit(self, workers: Iterable[int]) -> None:
        """Notes that these workers are sent `commit`."""
        for worker in workers:
            self._move(worker, MemberEvent.COMMIT)

    # -- losses -----------------------------------------------------------------------------------------------------

    def lose(self, worker: int) -> None:
        """Gives a worker's seat up, or notes that an attempt ended before it had a seat."""
        self.seats.pop(worker, None)
        self._move(worker, MemberEvent.LOSE)

    def expect(self, worker: int, now: float, *, replaced: bool) -> None:
        """Notes whether a lost worker is replaced; does not apply if a newer attempt has joined meanwhile."""
        if self.state(worker) is MemberState.LOST:
            self._move(worker, MemberEvent.EXPECT if replaced else MemberEvent.GIVE_UP)
            self.lost_at[worker] = now

    def excuse(self, worker: int) -> None:
        """Notes that a lost worker had said good-bye and is not missed; no effect once a newer attempt has joined."""
        if self.state(worker) is MemberState.LOST:
            self._move(worker, MemberEvent.LEAVE)

    def dismiss(self, worker: int, now: float, *, done: bool) -> Seat:
        """Takes a worker's seat away because the run ends without it; `done` says that the worker has done its rows."""
        seat = self.seats.pop(worker)
        self._move(worker, MemberEvent.LEAVE if done else MemberEvent.DISMISS)
        if not done:
            self.lost_at[worker] = now
        return seat

    def retire(self, worker: int) -> None:
        """Takes a worker's seat away, so that another worker can have its slot."""
        seat = self.seats.pop(worker)
        self._move(worker, MemberEvent.RETIRE)
        self.retired.add((worker, seat.attempt))

    # -- questions --------------------------------------------------------------------------------------------------

    def answered(self, worker: int) -> bool:
        """Whether a worker with a seat has answered the newest `prepare`."""
        return self.state(worker) in (MemberState.PREPARED, MemberState.COMMITTED)

    @property
    def missing(self) -> set[int]:
        """Workers that were lost and have not come back; helpers, which have no rows, do not count."""
        return {worker for worker in self.lost_at if worker < self.workers}

    @property
    def unreplaced(self) -> set[int]:
        """Missing workers for which no replacement will be started."""
        return {worker for worker in self.missing if self.state(worker) is MemberState.UNREPLACED}

    def awaited(self, since: float) -> set[int]:
        """Workers and helpers that were lost after `since` and whose replacements may still join."""
        lost = (worker for worker, lost_at in self.lost_at.items() if lost_at > since)
        return {worker for worker in lost if self.state(worker) is MemberState.AWAITED}

    @property
    def unseen(self) -> tuple[int, ...]:
        """Workers that have never joined."""
        return tuple(w for w in range(self.workers) if w not in self.rows)

    @property
    def present(self) -> set[int]:
        """Workers that have a seat; helpers do not count."""
        return {worker for worker in self.seats if worker < self.workers}

    @property
    def total_rows(self) -> int:
        """Training rows of all workers: an epoch of the run."""
        return sum(self.rows.values())
