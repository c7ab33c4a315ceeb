"""Who is in the run: seats, generations and deadlines, as a machine with no sockets and no clock of its own.

A generation is one agreed membership. It is formed in two phases, prepare and commit, because workers must agree on how
far the joint model has come before they go on with other members: see `thinwire.exchange.peer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thinwire.engine.ports import Header


class Send(NamedTuple):
    """A message to one worker."""

    worker: int
    attempt: int
    header: Header


class Lost(NamedTuple):
    """A seat that was given up, and why."""

    worker: int
    attempt: int
    reason: str


@dataclass
class Seat:
    """A worker that is in, or on its way in."""

    worker: int
    attempt: int
    address: str
    host: str
    pid: int
    hello: Header
    last_seen: float
    landed: int = 0
    fresh: bool = True
    digest: str = ""
    prepared: int = 0
    called_at: float | None = None
    """Since when a call to a generation is unanswered."""
    progress: Header = field(default_factory=dict)


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which waiting turns into an answer."""

    start_s: float = 120.0
    """Until the first generation forms with those who are there."""
    silence_s: float = 15.0
    """Without a heartbeat, until a worker counts as lost."""
    prepare_s: float = 15.0
    """Until a worker that does not answer a prepare counts as lost."""
    rejoin_s: float = 120.0
    """Until a lost worker's replacement is no longer waited for at the end of the run."""
    settle_s: float = 0.05
    """After a join or a loss, so that several at once make one generation."""


class Membership:
    """Seats by worker number. Every method takes the time; decisions come out as Send and Lost."""

    def __init__(self, workers: int, deadlines: Deadlines | None = None) -> None:
        self.workers = workers
        self.deadlines = deadlines or Deadlines()
        self.seats: dict[int, Seat] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.reference = -1
        self.landed = 0
        self.attempts: dict[int, int] = {}
        """The newest attempt seen of every worker: the fence."""
        self.remembered: dict[int, Header] = {}
        """The last progress of every worker, its successor's starting point."""
        self._first_join: float | None = None
        self._changed_at: float | None = None
        self.formed = False

    def join(self, header: Header, worker: int, now: float) -> list[Send | Lost]:
        """Takes a worker in; an older attempt than the newest known is told to leave."""
        attempt = int(header["a"])
        if not 0 <= worker < self.workers or attempt < self.attempts.get(worker, -1):
            return [Send(worker, attempt, {"t": "leave", "why": "a newer attempt has taken this place"})]
        found: list[Send | Lost] = []
        current = self.seats.get(worker)
        if current is not None and current.attempt != attempt:
            found += self.lose(worker, current.attempt, "replaced by a newer attempt", now)
            found.append(Send(worker, current.attempt, {"t": "leave", "why": "replaced by a newer attempt"}))
        self.attempts[worker] = attempt
        self.seats[worker] = Seat(
            worker=worker,
            attempt=attempt,
            address=str(header["address"]),
            host=str(header.get("host", "?")),
            pid=int(header.get("pid", 0)),
            hello=dict(header),
            last_seen=now,
        )
        self._first_join = now if self._first_join is None else self._first_join
        self._changed_at = now
        return found

    def lose(self, worker: int, attempt: int, reason: str, now: float) -> list[Send | Lost]:
        """Gives a seat up."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != attempt:
            return []
        del self.seats[worker]
        self._changed_at = now
        return [Lost(worker, attempt, reason)]

    def beat(self, header: Header, worker: int, now: float) -> bool:
        """Notes a sign of life; False from one that has no seat."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != header["a"]:
            return False
        seat.last_seen = now
        seat.landed = int(header.get("landed", seat.landed))
        if header.get("progress"):
            seat.progress = dict(header["progress"])
            self.remembered[worker] = seat.progress
        return True

    def prepared(self, header: Header, worker: int, now: float) -> list[Send | Lost]:
        """Notes an answer to a prepare; the last one commits the generation."""
        seat = self.seats.get(worker)
        if seat is None or seat.attempt != header["a"] or header["g"] != self.generation:
            return []
        seat.last_seen = now
        seat.prepared, seat.called_at = self.generation, None
        seat.landed, seat.fresh, seat.digest = (
            int(header["landed"]),
            bool(header["fresh"]),
            str(header["digest"]),
        )
        return self._try_commit()

    def tick(self, now: float) -> list[Send | Lost]:
        """What the passing of time brings: silence, a generation to prepare."""
        found: list[Send | Lost] = []
        for seat in list(self.seats.values()):
            if now - seat.last_seen > self.deadlines.silence_s:
                silent = f"no heartbeat for {self.deadlines.silence_s:.0f} s"
                found += self.lose(seat.worker, seat.attempt, silent, now)
        for seat in list(self.seats.values()):
            if seat.called_at is not None and now - seat.called_at > self.deadlines.prepare_s:
                found += self.lose(seat.worker, seat.attempt, "did not answer the call to a generation", now)
        if self._changed_at is not None and now - self._changed_at >= self.deadlines.settle_s:
            found += self._prepare(now)
        return found

    def missing(self) -> tuple[int, ...]:
        """Workers of the run that have no seat."""
        return tuple(w for w in range(self.workers) if w not in self.seats)

    def _prepare(self, now: float) -> list[Send | Lost]:
        if not self.seats:
            self._changed_at = None
            return []
        if not self.formed and self.missing():
            assert self._first_join is not None
            if now - self._first_join < self.deadlines.start_s:
                return []
        self._changed_at = None
        self.generation += 1
        for seat in self.seats.values():
            seat.called_at = now if seat.called_at is None else seat.called_at
        return [Send(s.worker, s.attempt, {"t": "prepare", "g": self.generation}) for s in self.seats.values()]

    def _try_commit(self) -> list[Send | Lost]:
        if self._changed_at is not None or any(s.prepared != self.generation for s in self.seats.values()):
            return []
        reference = self._choose_reference()
        self.formed = True
        self.members = tuple(sorted(self.seats))
        self.reference, self.landed = reference.worker, reference.landed
        members: dict[str, Any] = {}
        for seat in self.seats.values():
            entry: dict[str, Any] = {"address": seat.address, "attempt": seat.attempt}
            if seat.attempt > 0 and seat.fresh and seat.worker in self.remembered:
                last = self.remembered[seat.worker]
                entry["position"] = last.get("position")
                entry["steps"] = last.get("steps", 0)
            members[str(seat.worker)] = entry
        header = {
            "t": "commit",
            "g": self.generation,
            "members": members,
            "reference": reference.worker,
            "landed": reference.landed,
            "digest": reference.digest,
            "totals": {str(w): int(p.get("rows", 0)) for w, p in self.remembered.items()},
        }
        return [Send(s.worker, s.attempt, dict(header)) for s in self.seats.values()]

    def _choose_reference(self) -> Seat:
        """Who holds the newest joint state; of those the lowest number."""
        return min(self.seats.values(), key=lambda s: (s.fresh, -s.landed, s.worker))
