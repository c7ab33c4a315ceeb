"""Who is in the run: seats, generations and deadlines, as a machine with no sockets and no clock of its own.

A generation is one agreed membership. It is formed in two phases, prepare and commit, because workers must agree on how
far the joint model has come before they go on with other members: see `thinwire.exchange.peer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from thinwire.coordinator.groups import Groups
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
    """A seat that was given up, and why."""

    worker: int
    attempt: int
    reason: str
    host: str = "?"


class Stalled(NamedTuple):
    """Rounds that do not come to an end, and the workers they wait for."""

    worker: int
    seconds: float
    waits_for: dict[str, list[int]]


class JointModelLost(NamedTuple):
    """Nobody who held the joint model is left."""

    workers: tuple[int, ...]


Decision = Send | Lost | Stalled | JointModelLost
ROWS_ARE_DONE = Leave(why="its rows are done", done=True)


@dataclass
class Seat:
    """A worker that is in, or on its way in."""

    worker: int
    attempt: int
    address: str
    host: str
    pid: int
    meets: str | None
    """Where the members of its group meet, where it is the first of one."""
    last_seen: float
    landed: int = 0
    fresh: bool = True
    """Whether it has yet to take the joint state over."""
    blank: bool = True
    """Whether it has never held one, not even an older one, as far as this run goes."""
    since: int = 0
    """The newest generation in which it held what all held; 0 for none."""
    digest: str = ""
    table: dict[str, Any] = field(default_factory=dict)
    """What it said of the table's tuples when it was last called to a generation, for all members to know."""
    prepared: int = 0
    called_at: float | None = None
    """Since when a call to a generation is unanswered."""
    suspect_since: float | None = None
    """When its connection broke, until it is heard again."""
    stalled_since: float | None = None
    """Since when it waits for rounds and none lands."""
    waits_for: dict[str, list[int]] = field(default_factory=dict)
    """Its open rounds, and the workers that each still misses something from."""
    progress: dict[str, Any] = field(default_factory=dict)


class StallWatch:
    """Rounds that wait too long may wait for a message that a broken connection lost: all are launched again.

    Where a worker is only slow, that costs little and changes nothing; each time in vain it is done half as often.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = self._patience_s = stall_s

    def note(self, seat: Seat, landed: int, now: float) -> None:
        """A worker has told how many rounds it has landed, and what it waits for."""
        if landed != seat.landed:
            self._patience_s = self._stall_s
        if landed != seat.landed or not seat.waits_for:
            seat.stalled_since = None
        elif seat.stalled_since is None:
            seat.stalled_since = now

    def look(self, seats: Iterable[Seat], now: float) -> Stalled | None:
        """The worker that has waited longest, if that is too long."""
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
    """Seats by worker number. Every method takes the time; what is to be done comes out as decisions."""

    def __init__(
        self,
        workers: int,
        deadlines: Deadlines | None = None,
        helpers: int = 0,
        group_size: int = 1,
        observe: Observer = unobserved,
    ) -> None:
        self.workers, self.helpers = workers, helpers
        self._observe = observe
        observe(Opened())
        self.groups = Groups(workers, group_size)
        self.deadlines = deadlines or Deadlines()
        self.seats: dict[int, Seat] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.reference = -1
        self.landed = 0
        self.attempts: dict[int, int] = {}
        """The newest attempt seen of every worker: the fence."""
        self.standing: dict[int, int] = {}
        """Newer attempts of workers that cannot be spared yet; each asks again from time to time."""
        self._firsts: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        """Training rows of every worker that has ever joined."""
        self.remembered: dict[int, dict[str, Any]] = {}
        """The last progress of every worker, its successor's starting point."""
        self._first_join: float | None = None
        self._last_join = self._last_move = 0.0
        self._room_made: float | None = None
        self.retired: set[tuple[int, int]] = set()
        """Workers and attempts that were done and left to make room."""
        self._changed_at: float | None = None
        self.formed = self.waits = False
        """Whether a generation has formed; and whether none can, because who holds a part is in no whole group."""
        self._stalls = StallWatch(self.deadlines.stall_s)

    def join(self, join: Join, worker: int, now: float) -> list[Decision]:
        """Takes a worker in. Of two attempts the newer stays, unless the older alone holds the joint model."""
        attempt = join.attempt
        if (worker, attempt) in self.retired:
            return [Send(worker, attempt, ROWS_ARE_DONE)]
        if not 0 <= worker < self.workers + self.helpers or attempt < self.attempts.get(worker, -1):
            return [Send(worker, attempt, Leave(why="a newer attempt has taken this place"))]
        found: list[Decision] = []
        current = self.seats.get(worker)
        if current is not None and current.attempt != attempt:
            if not self._can_spare(current, now):
                self.standing[worker] = attempt
                return [Send(worker, attempt, Wait())]
            found += self.lose(worker, current.attempt, "replaced by a newer attempt", now)
            found.append(Send(worker, current.attempt, Leave(why="replaced by a newer attempt")))
        self.standing.pop(worker, None)
        self.attempts[worker] = attempt
        self._firsts.setdefault(worker, attempt)
        self.rows[worker] = join.rows or 0
        self.seats[worker] = Seat(
            worker=worker,
            attempt=attempt,
            address=join.address,
            host=join.host,
            pid=join.pid,
            meets=join.meets,
            last_seen=now,
        )
        if worker < self.workers:
            self._first_join = now if self._first_join is None else self._first_join
            self._last_join = self._last_move = now
        self._changed_at = now
        self.waits = False  # until the generation that is now to form shows whether it still does
        return found

    def answer(self, worker: int, attempt: int, *, revives: bool) -> Rejoin | Leave:
        """What to say to an attempt that has no seat and is heard: to join again, or to leave."""
        done = (worker, attempt) in self.retired
        if revives and attempt >= self.attempts.get(worker, attempt + 1) and not done:
            return Rejoin()
        return Leave(why="this worker's place was given up", done=done)

    def caught(self, worker: int) -> None:
        """Notes that a worker has taken the joint state over."""
        self.seats[worker].blank = False

    def _can_spare(self, seat: Seat, now: float) -> bool:
        """Whether the joint model would not go with it: nothing was agreed on yet, or one who has it is heard."""
        lane = self.groups.lane_of(seat.worker)
        others = [s for s in self.seats.values() if s is not seat and s.worker < self.workers]
        heard_since = now - self.deadlines.silence_s / 2
        others = [s for s in others if self.groups.lane_of(s.worker) == lane and s.last_seen >= heard_since]
        return not self.formed or seat.blank or any(not s.blank for s in others)

    def lose(self, worker: int, attempt: int, reason: str, now: float) -> list[Decision]:
        """Gives a seat up."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != attempt:
            return []
        del self.seats[worker]
        self._observe(SeatLost(worker))
        self._changed_at = self._last_move = now
        self.groups.break_up(worker)
        fellows = [self.seats[w] for w in self.groups.fellows(worker) if w in self.seats]
        return [Lost(worker, attempt, reason, seat.host), *(Send(s.worker, s.attempt, Stand()) for s in fellows)]

    def come_together(self, worker: int, meeting: int, now: float) -> None:
        """A group that met so many times has fallen apart, though all may be here: it is to meet once more."""
        if self.groups.break_up(worker, meeting):
            self._changed_at = now

    def make_room(self, finished: set[int], lost: set[int], now: float) -> list[Decision]:
        """Ends a worker that is done, where one that never came, or was lost, may be waiting for its slot."""
        wait_s = self.deadlines.gather_s * (1 if self.unseen else 3)  # a lost one's successor may be on its way
        waiting = bool(self.unseen or lost) and self.formed and not self.changing and self.groups.size == 1
        if not waiting or now - self._last_move < wait_s:
            return []
        done = [s for s in self.seats.values() if s.worker in finished and self._can_spare(s, now)]
        if not done:
            return []
        seat = max(done, key=lambda s: s.worker)
        self._room_made = now
        self.retired.add((seat.worker, seat.attempt))
        self.lose(seat.worker, seat.attempt, "", now)
        return [Send(seat.worker, seat.attempt, ROWS_ARE_DONE)]

    def room_for(self, finished: set[int], lost: set[int], now: float) -> bool:
        """Whether a worker that never came, or was lost, may still come, once all who are here are done."""
        if (not self.unseen and not lost) or self.groups.size > 1:
            return False
        waited = self._room_made is not None and now - self._room_made < self.deadlines.rejoin_s
        return waited or sum(not s.blank for s in self.seats.values() if s.worker in finished) > 1

    @property
    def unseen(self) -> tuple[int, ...]:
        """Workers that have never joined."""
        return tuple(w for w in range(self.workers) if w not in self.rows)

    def suspect(self, worker: int, attempt: int, now: float) -> None:
        """Its connection broke: it has a moment to be heard again."""
        seat = self.seats.get(worker)
        if seat is not None and seat.attempt == attempt and seat.suspect_since is None:
            seat.suspect_since = now

    def beat(self, beat: Beat, worker: int, now: float) -> bool:
        """Notes a sign of life; False from one that has no seat."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != beat.attempt:
            return False
        seat.last_seen, seat.suspect_since, seat.waits_for = now, None, beat.waiting
        self._stalls.note(seat, beat.landed, now)
        seat.landed = beat.landed
        if beat.progress:
            seat.progress = dict(beat.progress)
            self.remembered[worker] = seat.progress
            self._observe(Heard(worker, int(seat.progress.get("rows", 0))))
        return True

    def prepared(self, answer: Prepared, worker: int, now: float) -> list[Decision]:
        """Notes an answer to a prepare; the last one commits the generation."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != answer.attempt or answer.generation != self.generation:
            return []
        seat.last_seen, seat.suspect_since = now, None
        seat.prepared, seat.called_at = self.generation, None
        seat.landed, seat.digest = answer.landed, answer.digest
        seat.fresh, seat.since, seat.table = answer.fresh, answer.since, answer.table or {}
        return self._try_commit()

    def tick(self, now: float) -> list[Decision]:
        """What the passing of time brings: silence, a generation to prepare."""
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
        if self._changed_at is None and self._all_prepared and (stalled := self._stalls.look(self.seats.values(), now)):
            self._changed_at = now
            found.append(stalled)
        if self._changed_at is not None and now - self._changed_at >= self.deadlines.settle_s:
            found += self._prepare(now)
        return found

    @property
    def _all_prepared(self) -> bool:
        """Whether all seats have answered the last call to a generation."""
        return all(seat.prepared == self.generation for seat in self.seats.values())

    @property
    def changing(self) -> bool:
        """Whether a generation is about to form."""
        return self._changed_at is not None and self.formed

    @property
    def settled(self) -> bool:
        """Whether those who work are all of one generation, and none is about to form."""
        here = [self.seats[worker] for worker in self.working]
        return self.formed and self._changed_at is None and all(s.prepared == self.generation for s in here)

    @property
    def total_rows(self) -> int:
        """Training rows over all workers, which make an epoch of the run."""
        return sum(self.rows.values())

    def missing(self) -> tuple[int, ...]:
        """Members to be that have no seat."""
        return tuple(w for w in range(self.workers + self.helpers) if w not in self.seats)

    @property
    def present(self) -> set[int]:
        """Workers that have a seat; helpers do not count."""
        return {worker for worker in self.seats if worker < self.workers}

    @property
    def working(self) -> set[int]:
        """Workers whose group is whole."""
        return self.groups.whole(self.present)

    def _prepare(self, now: float) -> list[Decision]:
        if not self.working:  # a helper alone waits, with what it holds, and so does a group that lacks somebody
            self._changed_at = self._changed_at if self.seats else None
            return []
        if not self.formed and self.missing():
            assert self._first_join is not None
            wait = self.deadlines
            if now - self._first_join < wait.start_s and now - self._last_join < wait.gather_s:
                return []
        self._changed_at = None
        self.generation += 1
        for seat in self.seats.values():
            seat.called_at = now if seat.called_at is None else seat.called_at
        return [Send(s.worker, s.attempt, Prepare(generation=self.generation)) for s in self.seats.values()]

    def _try_commit(self) -> list[Decision]:
        if self._changed_at is not None or not self._all_prepared:
            return []
        here = [s for s in self.seats.values() if s.worker in self.working or s.worker >= self.workers]
        if not here:
            return []
        lanes: dict[int, list[Seat]] = {}
        for seat in here:
            lanes.setdefault(self.groups.lane_of(seat.worker), []).append(seat)
        bare = [number for number, lane in lanes.items() if not any(s.since for s in lane)]
        if self.formed and bare:
            held = {self.groups.lane_of(s.worker) for s in self.seats.values() if s.since}
            self.waits = held.issuperset(bare)  # who holds it stands by, until its own group is whole
            return [] if self.waits else [JointModelLost(tuple(sorted(self.seats)))]  # to go on would undo the run
        self.formed, self.waits = True, False
        self.members = tuple(sorted(s.worker for s in here))
        self.groups.form(self.members)
        found: list[Decision] = []
        for number in sorted(lanes, reverse=True):
            found += self._commit(lanes[number])
        return found

    def _commit(self, lane: list[Seat]) -> list[Decision]:
        """Those who hold the same part, or all of them where nobody holds a part only, begin a generation."""
        reference = _newest(lane)
        self.reference, self.landed = reference.worker, reference.landed
        members: dict[int, dict[str, Any]] = {}
        for seat in lane:
            if seat is reference or _equals(seat, reference):
                seat.blank = False  # it holds the joint model without being handed it
            entry: dict[str, Any] = {"address": seat.address, "attempt": seat.attempt}
            again = seat.attempt != self._firsts[seat.worker]  # also where it thinks otherwise, and loaded a checkpoint
            if (seat.fresh or again) and seat.worker in self.remembered:
                last = self.remembered[seat.worker]
                entry["position"] = last.get("position")
                entry["steps"], entry["first_loss"] = last.get("steps", 0), last.get("first_loss")
            members[seat.worker] = entry
        commit = Commit(
            generation=self.generation,
            members=members,
            reference=reference.worker,
            landed=reference.landed,
            digest=reference.digest,
            since=reference.since,
            tables={seat.worker: seat.table for seat in lane if seat.table},
            total_rows=self.total_rows,
            totals={worker: int(progress.get("rows", 0)) for worker, progress in self.remembered.items()},
        )
        meets = {worker: seat.meets for worker, seat in self.seats.items()}
        return [Send(s.worker, s.attempt, replace(commit, group=self.groups.told(s.worker, meets))) for s in lane]


def _equals(seat: Seat, reference: Seat) -> bool:
    """Whether it holds what the reference holds; each worker judges the same for itself (`Mesh`)."""
    if seat.since != reference.since:
        return False
    if seat.fresh:
        return reference.landed == 0 and seat.digest == reference.digest
    return seat.landed == reference.landed


def _newest(lane: list[Seat]) -> Seat:
    """Who holds the newest joint state; of those the lowest number.

    A generation counts for more than rounds: who was left out of the newest may have landed as many in another way.
    """
    return min(lane, key=lambda s: (s.fresh, -s.since, -s.landed, s.worker))
