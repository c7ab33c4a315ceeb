"""Observes a schedule while it runs, and checks invariants."""

from __future__ import annotations

import bisect
import hashlib
from typing import Any

import torch
from torch import Tensor

from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.protocol.observation import (
    Concluded,
    GroupLeft,
    Heard,
    Merged,
    Observation,
    Opened,
    ReplicaEntered,
    SeatLost,
    StateLoaded,
    Synchronised,
)

PLACES, PERIOD = 512, 2
"""Number of steps that are marked, and the largest period of the strategies whose steps are checked."""
LAST_SEEN = 64
Owner = tuple[int, int]
"""A worker and its attempt."""


class BrokenInvariantError(AssertionError):
    """An invariant is violated: something happened that must not happen under any faults."""


class InvariantChecker:
    """Observes every step, landing and state transfer of one run."""

    def __init__(self, time: VirtualTime, *, ledger: str, group_size: int = 1) -> None:
        self.time, self._statistics, self._group_size = time, ledger, group_size
        self.steps: dict[Owner, list[tuple[tuple[int, int], int]]] = {}
        """By owner, the positions of its steps and their rows."""
        self.places: dict[tuple[int, int, int], int] = {}
        """By worker, attempt and step, the place of its mark."""
        self._stepped_at: dict[Owner, list[float]] = {}
        """By owner, the time at which it began each step."""
        self._broken_at: list[float] = []
        """Times at which a group lost a worker, or members noticed that."""
        self._held: dict[tuple[int, int, str, int], tuple[str, Owner]] = {}
        """By generation, rounds landed, kind and lane: the joint model's digest, and the first owner that had it."""
        self._final: dict[Owner, str] = {}
        """By owner, the digest of the joint model at the end of its run."""
        self._alone: dict[Owner, int] = {}
        """By owner whose replica is the joint model, the last generation in which it was alone. The entry ends once the
        worker has put its replica into the joint model, even several generations later."""
        self._before: dict[Owner, Tensor] = {}
        """By owner, the ledger in its joint model at the last observation."""
        self._heard: dict[int, int] = {}
        """By worker, the rows that it has reported to the coordinator."""

    def owner(self) -> Owner:
        """The worker and attempt whose code runs now."""
        found: Any = self.time.current.owner
        return int(found[0]), int(found[1])

    def stepped(self, owner: Owner, position: tuple[int, int], rows: int) -> int | None:
        """Records a step; returns the place of its mark, or None if all places are taken."""
        done = self.steps.setdefault(owner, [])
        done.append((position, rows))
        self._stepped_at.setdefault(owner, []).append(self.time.now())
        if len(self.places) == PLACES:
            return None
        return self.places.setdefault((*owner, len(done) - 1), len(self.places))

    # -- observing --------------------------------------------------------------------------------------------------

    def observe(self, seen: Observation) -> None:
        """Checks the invariants of one observation; see `thinwire.protocol.observation`."""
        with torch.no_grad():
            match seen:
                case Opened():  # a resumed run counts generations, rounds and rows from its checkpoint
                    self._held.clear()
                    self._heard.clear()
                    self._final.clear()
                case Heard():
                    self._rows_heard(seen)
                case SeatLost() | GroupLeft():
                    self._broken_at.append(self.time.now())
                case Synchronised():
                    self._synchronised(seen)
                case StateLoaded():
                    self._alone.pop(self.owner(), None)
                case ReplicaEntered():
                    if not seen.alone and seen.generation > self._alone.get(self.owner(), 0):
                        self._alone.pop(self.owner(), None)
                case Merged():
                    self._merged(seen)
                case Concluded():
                    if seen.settled:
                        self._final[self.owner()] = _digest(seen.model)

    def _synchronised(self, seen: Synchronised) -> None:
        owner = self.owner()
        if seen.num_members == 1:
            self._alone[owner] = seen.generation
        if owner not in self._alone:
            self._compare("state", seen.generation, seen.landed, seen.model)

    def _merged(self, seen: Merged) -> None:
        for kind, values in (("reply", seen.reply), ("joint model", seen.model)):
            if values is not None and not values.isfinite().all():
                raise BrokenInvariantError(f"worker {self.owner()[0]} landed a {kind} that is not finite")
        self._compare("reply", seen.generation, seen.landed, seen.reply)
        self._compare("state", seen.generation, seen.landed, seen.model)
        for number, values in enumerate(seen.kept):
            self._compare(f"optimizer state {number}", seen.generation, seen.landed, values)
        if self._statistics == "shares" and seen.model is not None:
            self._counted_once(seen.model)

    def _rows_heard(self, seen: Heard) -> None:
        """Checks that a worker's successor continues where the coordinator last heard of the worker, not before."""
        before = self._heard.get(seen.worker, 0)
        if seen.rows < before:
            raise BrokenInvariantError(
                f"worker {seen.worker} had done {before} rows, its successor begins at {seen.rows}"
            )
        self._heard[seen.worker] = seen.rows

    def _compare(self, kind: str, generation: int, landed: int, values: Tensor | None) -> None:
        """Checks that live workers of a generation with equally many landed rounds hold the same joint model."""
        if values is None:
            return
        owner, digest = self.owner(), _digest(values)
        key = (generation, landed, kind, owner[0] % self._group_size)
        first, whose = self._held.setdefault(key, (digest, owner))
        if first != digest:
            raise BrokenInvariantError(
                f"in generation {generation}, {landed} rounds landed, worker {owner[0]}.{owner[1]} has another {kind} "
                f"than worker {whose[0]}.{whose[1]}"
            )

    def _counted_once(self, model: Tensor) -> None:
        """Checks, for plain averaging, that a step's share enters the joint model once and does not change later."""
        now, before = model.clone(), self._before.get(self.owner())
        self._before[self.owner()] = now
        if before is None:
            return
        changed = ((before != 0) & ((now - before).abs() > 1e-5)).nonzero().flatten().tolist()
        if changed and self._continues(before, now):
            raise BrokenInvariantError(f"steps {self._whose(changed)} were counted again")

    @staticmethod
    def _continues(before: Tensor, now: Tensor) -> bool:
        """Whether one state followed from the other. A worker that took an older model over starts from that model."""
        return bool(((before != 0) & (now == 0)).sum() == 0)

    def _may_be_torn(self, place: int) -> bool:
        """Whether a step may belong to a round that was under way when a group broke: other groups may have landed that
        round in some lanes and not in others.

        The group itself may have landed that round in all lanes, and made the steps of the next one. The shares of
        other groups' steps in that round differ as well, because fewer groups share the round.
        """
        worker, attempt, step = next(mark for mark, where in self.places.items() if where == place)
        times = self._stepped_at[worker, attempt]
        made = (bisect.bisect(times, broken) for broken in self._broken_at)  # numbers of steps begun before each break
        return any(-PERIOD <= count - 1 - step < 2 * PERIOD for count in made)

    def _whose(self, places: list[int]) -> str:
        names = {place: f"{w}.{a}:{step}" for (w, a, step), place in self.places.items()}
        return ", ".join(names[place] for place in places[:6])

    # -- afterwards -------------------------------------------------------------------------------------------------

    def check_rows(self, summary: dict[str, Any], per_worker: dict[int, int], epochs: int) -> None:
        """Checks that every row of every epoch was trained on, across all successors of a worker."""
        if not summary["complete"]:
            return
        wanted = sum(per_worker.values()) * epochs
        grouped = self._group_size > 1  # a step that a broken group left unfinished is repeated
        if summary["rows"] < wanted or (summary["rows"] > wanted and not grouped):
            raise BrokenInvariantError(f"the summary says {summary['rows']} rows, and {wanted} are {epochs} epochs")
        for worker, rows in per_worker.items():
            done: dict[tuple[int, int], int] = {}
            for owner in sorted(o for o in self.steps if o[0] == worker):
                positions = [position for position, _ in self.steps[owner]]
                if len(set(positions)) != len(positions) and not grouped:
                    raise BrokenInvariantError(f"worker {owner[0]}.{owner[1]} trained twice on the same rows")
                done |= dict(self.steps[owner])
            if sum(done.values()) != rows * epochs:
                raise BrokenInvariantError(
                    f"worker {worker} trained on {sum(done.values())} of {rows * epochs} rows, and the run is complete"
                )

    def check_end(self, lost: set[Owner]) -> None:
        """Checks that all workers that were not lost ended with the same model."""
        ends = {owner: digest for owner, digest in self._final.items() if owner not in lost}
        for lane in range(self._group_size):
            alike = {owner: digest for owner, digest in ends.items() if owner[0] % self._group_size == lane}
            if len(set(alike.values())) > 1:
                raise BrokenInvariantError(f"workers ended on different models: {alike}")

    def check_model(self, model: Tensor) -> None:
        """Checks how often the finished model contains each step."""
        if self._statistics == "none":
            return
        parts = torch.chunk(model, self._group_size)
        if self._group_size > 1 and self._statistics == "shares":
            places = torch.stack([p != parts[0] for p in parts]).any(0).nonzero().flatten().tolist()
            if torn := [place for place in places if not self._may_be_torn(place)]:
                raise BrokenInvariantError(
                    f"steps {self._whose(torn)} are in some parts of the model and not in others"
                )
        model = parts[0]
        allowed = {0.0, 1.0} if self._statistics == "ones" else {0.0, 1.0, 1 / 2, 1 / 3, 1 / 4}
        for value in sorted(set(model.tolist())):
            if not any(abs(value - one) < 1e-5 for one in allowed):
                places = (model == value).nonzero().flatten().tolist()
                raise BrokenInvariantError(f"steps {self._whose(places)} are {value:.4f} times in the model")


def _digest(values: Tensor | None) -> str:
    return "" if values is None else hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()
