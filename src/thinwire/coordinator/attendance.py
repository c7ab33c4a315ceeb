"""Who takes part in a run: workers that join, are lost, are awaited, or have left."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from thinwire import events
from thinwire.coordinator import failures
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.membership import Decision, Lost, Membership
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.coordinator.ports import Emit, Exit, Send, Workforce
from thinwire.coordinator.records import Records
from thinwire.coordinator.rows import Rows
from thinwire.protocol import messages
from thinwire.protocol.clock import Clock
from thinwire.protocol.handshake import check_hello
from thinwire.protocol.messages import ANY_ATTEMPT, Leave

FAREWELL_S = 0.8
"""A worker's last word may be heard after its end is seen, when the run is ending."""
ENDING = Leave(why="the run is ending", done=True)
_log = logging.getLogger("thinwire.coordinator")


class Attendance:
    """Workers beyond their seats: which are done, gone for good, or expected back."""

    def __init__(
        self,
        membership: Membership,
        workforce: Workforce,
        policy: Policy,
        outcome: Outcome,
        ending: Ending,
        records: Records,
        *,
        clock: Clock,
        send: Send,
        emit: Emit,
    ) -> None:
        self._membership, self._workforce, self._policy, self._outcome = membership, workforce, policy, outcome
        self._ending, self._records, self._clock, self._send, self._emit = ending, records, clock, send, emit
        self.rows = Rows(policy.workers)
        self.finished: set[int] = set()
        """Workers whose rows are done."""
        self.left: set[int] = set()
        """Workers that have said good-bye."""
        self._gone: set[tuple[int, int]] = set()
        """Attempts whose processes have ended, or that are to end."""
        self._parting: dict[Exit, float] = {}
        """Ends of processes whose last words may still come, and since when."""
        self._absent_since: dict[int, float] = {}
        """Workers that were lost and have not come back."""
        self.never: set[int] = set()
        """Lost workers that nobody will replace."""
        self.done: set[int] = set()
        """Workers that were lost when all rows were done, and nothing but the end was to come."""

    # -- coming -----------------------------------------------------------------------------------------------------

    def admits(self, worker: int, join: messages.Join) -> bool:
        """Whether a worker may ask for a seat; one that comes too late is told to leave.

        Raises:
            ProtocolError: The worker runs a thinwire that this one cannot train with.
        """
        check_hello(worker, join)
        if (worker, join.attempt) in self._gone:
            return False  # its process ended while this was on the way
        others = self._membership.working - {worker}
        too_late = worker in self._membership.unseen or (self._ending.closed and others)
        if self._ending.since is not None and too_late:
            self._gone.add((worker, join.attempt))
            self._send(worker, join.attempt, ENDING)
            return False
        return True

    def seated(self, worker: int, join: messages.Join, *, back: bool) -> None:
        """A worker has a seat; `back` where this attempt had one before."""
        if self._ending.since is not None and not back:
            self._ending.late.add(worker)
        self.finished.discard(worker)
        seat = self._membership.seats[worker]
        if join.rows == 0 and worker < self._policy.workers:
            _log.warning("worker %s on %s has no rows to train on; use fewer workers", worker, seat.host)
        self.rows.heard(worker, join, self._membership.rows)
        again = self._absent_since.pop(worker, None) is not None
        self._records.joined(seat, self._membership.rows[worker], again=again)

    # -- going ------------------------------------------------------------------------------------------------------

    def ended(self, exits: list[Exit]) -> Iterator[Decision]:
        """What follows from processes that have ended: now, or once their last words can be in."""
        now = self._clock()
        self._parting = dict.fromkeys(exits, now) | self._parting
        for gone, since in list(self._parting.items()):
            if self._ending.since is None or now - since > FAREWELL_S:
                yield from self._exited(gone)

    def _exited(self, gone: Exit) -> list[Decision]:
        del self._parting[gone]
        known = (gone.worker, gone.attempt) in self._gone
        self._gone.add((gone.worker, gone.attempt))
        if known or gone.worker in self.left:
            return []
        seat = self._membership.seats.get(gone.worker)
        attempt = seat.attempt if seat is not None and gone.attempt == ANY_ATTEMPT else gone.attempt
        decisions = self._membership.lose(gone.worker, attempt, gone.reason, self._clock())
        if not decisions and gone.worker not in self._membership.seats:
            return [Lost(gone.worker, gone.attempt, f"{gone.reason} before it joined")]
        return decisions

    def lose(self, lost: Lost) -> None:
        """A seat was given up: the worker is replaced, where it can be.

        Raises:
            LostWorkersError: Too few workers are left.
        """
        if lost.worker in self.left:
            return
        if not self._workforce.revives:
            self._gone.add((lost.worker, lost.attempt))
        self._outcome.workers_lost += 1
        self._absent_since[lost.worker] = self._clock()
        if self._ending.since is not None and lost.worker in self.finished:
            self.done.add(lost.worker)
        self.finished.discard(lost.worker)
        self._ending.agreed.discard(lost.worker)
        steps = self._records.lose(lost.worker)
        worker, attempt, reason, host = lost
        self._emit(events.WorkerLost(worker=worker, attempt=attempt, host=host, reason=reason, steps=steps))
        if self._ending.closed or not self._workforce.replace(lost.worker, lost.attempt + 1):
            self.never.add(lost.worker)
            if lost.worker < self._policy.workers and lost.worker not in self.done:
                self._outcome.unreplaced.add(lost.worker)
            alive = len(self._membership.working)
            if alive < self._policy.min_workers and not self._ending.closed:
                raise failures.too_few(self._policy, lost, alive)

    def dismiss(self, workers: set[int]) -> None:
        """The run ends without these workers."""
        for worker in workers:
            seat = self._membership.seats.pop(worker)
            if worker not in self.finished | self.done:
                self._absent_since.setdefault(worker, self._clock())
            self._gone.add((worker, seat.attempt))
            self._send(worker, seat.attempt, ENDING)

    def check(self, started: float) -> None:
        """Ends a run that nobody is in.

        Raises:
            TimedOutError: Nobody has come.
            LostWorkersError: Nobody is left.
        """
        members, ended = self._membership, bool(self.left or self._outcome.results)
        if not members.working and not members.formed:
            if self._clock() - started > self._policy.deadlines.start_s:
                raise failures.nobody_came(self._policy, self._outcome)
        elif (not members.working or members.waits) and not (ended or self.awaited()):
            raise failures.nobody_left(self._policy, members.present, self._outcome)

    # -- missing ----------------------------------------------------------------------------------------------------

    @property
    def missed(self) -> set[int]:
        """Lost workers that had rows; helpers have none."""
        return {worker for worker in self._absent_since if worker < self._policy.workers}

    def awaited(self) -> list[int]:
        """Lost workers whose replacements are still on their way."""
        now, patience_s = self._clock(), self._policy.deadlines.rejoin_s
        return [w for w, since in self._absent_since.items() if w not in self.never and now - since < patience_s]
