"""Handles joins, losses and departures of workers: replacements, events, and the errors that end a run."""

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
"""While the run ends, a worker's last message may arrive this many seconds after its process has ended."""
ENDING = Leave(why="the run is ending", done=True)
_log = logging.getLogger("thinwire.coordinator")


class Attendance:
    """Which workers are done, which have left, which have ended, and which are replaced."""

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
        self._membership, self._roster = membership, membership.roster
        self._workforce, self._policy, self._outcome = workforce, policy, outcome
        self._ending, self._records, self._clock, self._send, self._emit = ending, records, clock, send, emit
        self.rows = Rows(policy.workers)
        self.finished: set[int] = set()
        """Workers that have done their rows."""
        self.left: set[int] = set()
        """Workers that have said good-bye."""
        self._gone: set[tuple[int, int]] = set()
        """Attempts whose processes have ended or are to end."""
        self._ended_processes: dict[Exit, float] = {}
        """Processes that have ended and whose last messages may still arrive, with the time of their end."""
        self.done: set[int] = set()
        """Workers that were lost after they had done their own rows, while the run was ending."""

    # -- joins ------------------------------------------------------------------------------------------------------

    def admits(self, worker: int, join: messages.Join) -> bool:
        """Whether a worker may ask for a seat; a worker that comes too late is told to leave.

        Raises:
            ProtocolError: The worker's version of thinwire cannot train with the driver's.
        """
        check_hello(worker, join)
        if (worker, join.attempt) in self._gone:
            return False  # the process ended while its join was on the way
        others = self._membership.working - {worker}
        too_late = worker in self._roster.unseen or (self._ending.closed and others)
        if self._ending.begun and too_late:
            self._gone.add((worker, join.attempt))
            self._send(worker, join.attempt, ENDING)
            return False
        return True

    def seated(self, worker: int, join: messages.Join, *, back: bool) -> None:
        """A worker has a seat; `back` says that the same attempt had a seat before."""
        self._ending.joined(worker, back=back)
        self.finished.discard(worker)
        seat = self._membership.seats[worker]
        if join.rows == 0 and worker < self._policy.workers:
            _log.warning("worker %s on %s has no rows to train on; use fewer workers", worker, seat.host)
        self.rows.heard(worker, join, self._roster.rows)
        self._records.joined(seat, self._roster.rows[worker])

    # -- losses -----------------------------------------------------------------------------------------------------

    def ended(self, exits: list[Exit]) -> Iterator[Decision]:
        """Decisions about processes that have ended; while the run ends, only after `FAREWELL_S`."""
        now = self._clock()
        self._ended_processes = dict.fromkeys(exits, now) | self._ended_processes
        for gone, since in list(self._ended_processes.items()):
            if not self._ending.begun or now - since > FAREWELL_S:
                yield from self._exited(gone)

    def _exited(self, gone: Exit) -> list[Decision]:
        del self._ended_processes[gone]
        known = (gone.worker, gone.attempt) in self._gone
        self._gone.add((gone.worker, gone.attempt))
        if known or gone.worker in self.left:
            return []
        seat = self._membership.seats.get(gone.worker)
        attempt = seat.attempt if seat is not None and gone.attempt == ANY_ATTEMPT else gone.attempt
        decisions = self._membership.lose(gone.worker, attempt, gone.reason, self._clock())
        if not decisions and gone.worker not in self._membership.seats:
            self._roster.lose(gone.worker)
            return [Lost(gone.worker, gone.attempt, f"{gone.reason} before it joined")]
        return decisions

    def lose(self, lost: Lost) -> None:
        """Handles a seat that was given up, and has the worker replaced where possible.

        Raises:
            LostWorkersError: Too few workers are left.
        """
        if lost.worker in self.left:
            self._roster.excuse(lost.worker)
            return
        if not self._workforce.revives:
            self._gone.add((lost.worker, lost.attempt))
        self._outcome.workers_lost += 1
        if self._ending.begun and lost.worker in self.finished:
            self.done.add(lost.worker)
        self.finished.discard(lost.worker)
        self._ending.lost(lost.worker)
        steps = self._records.lose(lost.worker)
        worker, attempt, reason, host = lost
        self._emit(events.WorkerLost(worker=worker, attempt=attempt, host=host, reason=reason, steps=steps))
        replaced = not self._ending.closed and self._workforce.replace(lost.worker, lost.attempt + 1)
        self._roster.expect(lost.worker, self._clock(), replaced=replaced)
        if not replaced:
            if lost.worker < self._policy.workers and lost.worker not in self.done:
                self._outcome.unreplaced.add(lost.worker)
            alive = len(self._membership.working)
            if alive < self._policy.min_workers and not self._ending.closed:
                raise failures.too_few(self._policy, lost, alive)

    def dismiss(self, workers: set[int]) -> None:
        """Ends the run without these workers."""
        for worker in workers:
            seat = self._roster.dismiss(worker, self._clock(), done=worker in self.finished | self.done)
            self._gone.add((worker, seat.attempt))
            self._send(worker, seat.attempt, ENDING)

    def check(self, started: float) -> None:
        """Ends a run that no worker is in.

        Raises:
            TimedOutError: No worker has joined in time.
            LostWorkersError: No worker is left, and no replacement is expected.
        """
        members, ended = self._membership, bool(self.left or self._outcome.results)
        if not members.working and not members.agreement.formed:
            if self._clock() - started > self._policy.deadlines.start_s:
                raise failures.nobody_came(self._policy, self._outcome)
        elif (not members.working or members.agreement.waits) and not (ended or self.awaited()):
            raise failures.nobody_left(self._policy, self._roster.present, self._outcome)

    def awaited(self) -> set[int]:
        """Lost workers whose replacements may still come."""
        return self._roster.awaited(self._clock() - self._policy.deadlines.rejoin_s)
