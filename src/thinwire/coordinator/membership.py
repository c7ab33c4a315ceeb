"""Membership of a run: seats, generations and deadlines, as a state machine without sockets or a clock of its own.

A generation is one agreed membership. It forms in two phases, prepare and commit, because the workers must agree on the
number of rounds in the joint model before they go on with other members: see `thinwire.exchange.member`. Two machines
hold the states: that of a generation in `generation.py`, and that of one worker in `member.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from thinwire.coordinator.generation import Agreement
from thinwire.coordinator.groups import Groups
from thinwire.coordinator.member import Roster, Seat
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import Beat, Commit, Join, Leave, Prepare, Prepared, Rejoin, Stand, Wait
from thinwire.protocol.observation import Heard, Observer, Opened, SeatLost, unobserved


class Send(NamedTuple):
    """A message to one worker."""

    worker: int
    attempt: int
    body: Body


class Lost(NamedTuple):
    """A seat that was given up, with the reason."""

    worker: int
    attempt: int
    reason: str
    host: str = "?"


class Stalled(NamedTuple):
    """Rounds that do not land, and the workers that they wait for."""

    worker: int
    seconds: float
    waits_for: dict[str, list[int]]


class JointModelLost(NamedTuple):
    """No worker that held the joint model is left."""

    workers: tuple[int, ...]


Decision = Send | Lost | Stalled | JointModelLost
ROWS_ARE_DONE = Leave(why="its rows are done", done=True)


class StallWatch:
    """Has stalled rounds launched again: they may wait for a message that was lost with a broken connection.

    Launching them again changes no result. The patience doubles each time and is reset when a round lands.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = self._patience_s = stall_s

    def note(self, seat: Seat, landed: int, now: float) -> None:
        """Notes how many rounds a worker has landed, and which workers it waits for."""
        if landed != seat.landed:
            self._patience_s = self._stall_s
        if landed != seat.landed or not seat.waits_for:
            seat.stalled_since = None
        elif seat.stalled_since is None:
            seat.stalled_since = now

    def look(self, seats: Iterable[Seat], now: float) -> Stalled | None:
        """The worker that has waited longest, if it has waited longer than the patience."""
        stalled = [(seat.stalled_since, seat.worker, seat) for seat in seats if seat.stalled_since is not None]
        if not stalled:
            return None
        since, worker, longest = min(stalled)
        if now - since < self._patience_s:
            return None
        for _, _, seat in stalled:
            seat.stalled_since = None
        self._patience_s *= 2
        return Stalled(worker, now - since, dict(longest.waits_for))


class Membership:
    """Which workers are in the run, and what each is told. Methods take the time and return decisions."""

    def __init__(
        self,
        workers: int,
        deadlines: Deadlines | None = None,
        helpers: int = 0,
        group_size: int = 1,
        observe: Observer = unobserved,
    ) -> None:
        self._observe = observe
        observe(Opened())
        self.roster = Roster(workers, helpers)
        self.seats = self.roster.seats
        self.groups = Groups(workers, group_size)
        self.deadlines = deadlines or Deadlines()
        self.agreement = Agreement()
        self.reference = -1
        self.landed = 0
        self._first_join: float | None = None
        self._last_join = 0.0
        self.last_move = 0.0
        """Time at which a worker last joined or was lost."""
        self._stalls = StallWatch(self.deadlines.stall_s)

    @property
    def working(self) -> set[int]:
        """Workers of whole groups."""
        return self.groups.whole(self.roster.present)

    # -- joins ------------------------------------------------------------------------------------------------------

    def join(self, join: Join, worker: int, now: float) -> list[Decision]:
        """Gives a worker a seat. The newer of two attempts stays, unless only the older one holds the joint model."""
        attempt, roster = join.attempt, self.roster
        if (worker, attempt) in roster.retired:
            return [Send(worker, attempt, ROWS_ARE_DONE)]
        if not 0 <= worker < roster.workers + roster.helpers or attempt < roster.attempts.get(worker, -1):
            return [Send(worker, attempt, Leave(why="a newer attempt has taken this place"))]
        found: list[Decision] = []
        current = self.seats.get(worker)
        if current is not None and current.attempt != attempt:
            if not self.can_spare(current, now):
                roster.standing[worker] = attempt
                return [Send(worker, attempt, Wait())]
            found += self.lose(worker, current.attempt, "replaced by a newer attempt", now)
            found.append(Send(worker, current.attempt, Leave(why="replaced by a newer attempt")))
        roster.join(join, worker, now)
        if worker < roster.workers:
            self._first_join = now if self._first_join is None else self._first_join
            self._last_join = self.last_move = now
        self.agreement.change(now)
        return found

    def answer(self, worker: int, attempt: int, *, revives: bool) -> Rejoin | Leave:
        """The answer to an attempt that is heard without having a seat: to join again, or to leave."""
        done = (worker, attempt) in self.roster.retired
        if revives and attempt >= self.roster.attempts.get(worker, attempt + 1) and not done:
            return Rejoin()
        return Leave(why="this worker's place was given up", done=done)

    def caught(self, worker: int) -> None:
        """Notes that a worker has taken the joint state over."""
        self.seats[worker].blank = False

    # -- losses -----------------------------------------------------------------------------------------------------

    def can_spare(self, seat: Seat, now: float) -> bool:
        """Whether the joint model survives the loss of a worker: none exists yet, or another live worker holds it."""
        lane = self.groups.lane_of(seat.worker)
        others = [s for s in self.seats.values() if s is not seat and s.worker < self.roster.workers]
        heard_since = now - self.deadlines.silence_s / 2
        others = [s for s in others if self.groups.lane_of(s.worker) == lane and s.last_seen >= heard_since]
        return not self.agreement.formed or seat.blank or any(not s.blank for s in others)

    def lose(self, worker: int, attempt: int, reason: str, now: float) -> list[Decision]:
        """Gives a seat up."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != attempt:
            return []
        self.roster.lose(worker)
        others = self._vacated(seat, now)
        return [Lost(worker, attempt, reason, seat.host), *(Send(s.worker, s.attempt, Stand()) for s in others)]

    def retire(self, seat: Seat, now: float) -> None:
        """Gives up the seat of a worker that is done, so that another worker can have its slot."""
        self.roster.retire(seat.worker)
        self._vacated(seat, now)

    def _vacated(self, seat: Seat, now: float) -> list[Seat]:
        """Handles a vacated seat; returns the seats of the other members of its group."""
        self._observe(SeatLost(seat.worker))
        self.agreement.change(now)
        self.last_move = now
        self.groups.break_up(seat.worker)
        return [self.seats[w] for w in self.groups.others_in_group(seat.worker) if w in self.seats]

    def come_together(self, worker: int, meeting: int, now: float) -> None:
        """A group has fallen apart in its `meeting`-th meeting, even if all members are present: it must meet again."""
        if self.groups.break_up(worker, meeting):
            self.agreement.change(now)

    # -- signs of life ----------------------------------------------------------------------------------------------

    def suspect(self, worker: int, attempt: int, now: float) -> None:
        """Notes that a worker's connection broke; the worker is lost unless it is heard again within `reconnect_s`."""
        seat = self.seats.get(worker)
        if seat is not None and seat.attempt == attempt and seat.suspect_since is None:
            seat.suspect_since = now

    def beat(self, beat: Beat, worker: int, now: float) -> bool:
        """Notes a heartbeat; False where the attempt has no seat."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != beat.attempt:
            return False
        seat.last_seen, seat.suspect_since, seat.waits_for = now, None, beat.waiting
        self._stalls.note(seat, beat.landed, now)
        seat.landed = beat.landed
        if beat.progress:
            seat.progress = dict(beat.progress)
            self.roster.remembered[worker] = seat.progress
            self._observe(Heard(worker, int(seat.progress.get("rows", 0))))
        return True

    def tick(self, now: float) -> list[Decision]:
        """Applies deadlines: loses silent workers, and calls a generation that is due."""
        found = self._lose_silent(now)
        if self.agreement.settled:
            stalled = self._stalls.look(self.seats.values(), now)
            if stalled is not None:
                self.agreement.change(now)
                found.append(stalled)
        if self.agreement.is_due(now, self.deadlines.settle_s):
            found += self._call(now)
        return found

    def _lose_silent(self, now: float) -> list[Decision]:
        found: list[Decision] = []
        for seat in list(self.seats.values()):
            if seat.suspect_since is not None and now - seat.suspect_since > self.deadlines.reconnect_s:
                broke = "its connection broke: the process has ended, or its machine cannot be reached"
                found += self.lose(seat.worker, seat.attempt, broke, now)
            elif now - seat.last_seen > self.deadlines.silence_s:
                silent = f"no heartbeat for {self.deadlines.silence_s:.0f} s"
                found += self.lose(seat.worker, seat.attempt, silent, now)
        for seat in list(self.seats.values()):
            if seat.called_at is not None and now - seat.called_at > self.deadlines.prepare_s:
                found += self.lose(seat.worker, seat.attempt, "did not answer the call to a generation", now)
        return found

    # -- generations ------------------------------------------------------------------------------------------------

    def _call(self, now: float) -> list[Decision]:
        """Calls all workers to a generation, once a whole group is present."""
        if not self.working:  # helpers alone wait, and so do groups that are not whole
            if not self.seats:
                self.agreement.desert()
            return []
        if not self.agreement.formed and len(self.seats) < self.roster.workers + self.roster.helpers:
            assert self._first_join is not None
            wait = self.deadlines
            if now - self._first_join < wait.start_s and now - self._last_join < wait.gather_s:
                return []
        self.agreement.call()
        self.roster.call(now)
        return [Send(s.worker, s.attempt, Prepare(generation=self.agreement.generation)) for s in self.seats.values()]

    def prepared(self, answer: Prepared, worker: int, now: float) -> list[Decision]:
        """Notes an answer to a call; the last answer commits the generation."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != answer.attempt or answer.generation != self.agreement.generation:
            return []
        seat.last_seen, seat.suspect_since = now, None
        seat.landed, seat.digest = answer.landed, answer.digest
        seat.fresh, seat.since, seat.table = answer.fresh, answer.since, answer.table or {}
        self.roster.answer(worker)
        all_answered = all(self.roster.answered(other) for other in self.seats)
        return self._agree() if self.agreement.called and all_answered else []

    def _agree(self) -> list[Decision]:
        """All have answered: each lane begins the generation, unless no lane holds some part of the joint model."""
        here = [s for s in self.seats.values() if s.worker in self.working or s.worker >= self.roster.workers]
        lanes: dict[int, list[Seat]] = {}
        for seat in here:
            lanes.setdefault(self.groups.lane_of(seat.worker), []).append(seat)
        bare = [number for number, lane in lanes.items() if not any(s.since for s in lane)]
        if self.agreement.formed and bare:
            held = {self.groups.lane_of(s.worker) for s in self.seats.values() if s.since}
            if held.issuperset(bare):  # the holder waits until its own group is whole
                self.agreement.stand_by()
                return []
            return [JointModelLost(tuple(sorted(self.seats)))]  # going on would lose what the run has learnt
        members = tuple(sorted(s.worker for s in here))
        self.agreement.commit(members)
        self.roster.commit(members)
        self.groups.form(members)
        found: list[Decision] = []
        for number in sorted(lanes, reverse=True):
            found += self._commit(lanes[number])
        return found

    def _commit(self, lane: list[Seat]) -> list[Decision]:
        """Begins a generation in one lane: the workers that hold the same part of the joint model."""
        reference = newest(lane)
        self.reference, self.landed = reference.worker, reference.landed
        commit = commit_of(lane, reference, self.agreement.generation, self.roster)
        meets = {worker: seat.meets for worker, seat in self.seats.items()}
        return [Send(s.worker, s.attempt, replace(commit, group=self.groups.told(s.worker, meets))) for s in lane]


def commit_of(lane: list[Seat], reference: Seat, generation: int, roster: Roster) -> Commit:
    """The commit for one lane: its members, and where each goes on."""
    members: dict[int, dict[str, Any]] = {}
    for seat in lane:
        if seat is reference or _equals(seat, reference):
            seat.blank = False  # it holds the joint model already
        entry: dict[str, Any] = {"address": seat.address, "attempt": seat.attempt}
        again = seat.attempt != roster.first_attempts[seat.worker]  # also if it has loaded a checkpoint
        if (seat.fresh or again) and seat.worker in roster.remembered:
            last = roster.remembered[seat.worker]
            entry["position"] = last.get("position")
            entry["steps"], entry["first_loss"] = last.get("steps", 0), last.get("first_loss")
        members[seat.worker] = entry
    return Commit(
        generation=generation,
        members=members,
        reference=reference.worker,
        landed=reference.landed,
        digest=reference.digest,
        since=reference.since,
        tables={seat.worker: seat.table for seat in lane if seat.table},
        total_rows=roster.total_rows,
        totals={worker: int(progress.get("rows", 0)) for worker, progress in roster.remembered.items()},
    )


def newest(lane: list[Seat]) -> Seat:
    """The seat with the newest joint state; the lowest number among equals.

    The generation is compared before the rounds: a worker that was left out of the newest generation may have landed
    the same number of rounds with other values.
    """
    return min(lane, key=lambda s: (s.fresh, -s.since, -s.landed, s.worker))


def _equals(seat: Seat, reference: Seat) -> bool:
    """Whether a worker holds the reference's joint state; `Mesh` applies the same rule on each worker."""
    if seat.since != reference.since:
        return False
    if seat.fresh:
        return reference.landed == 0 and seat.digest == reference.digest
    return seat.landed == reference.landed
