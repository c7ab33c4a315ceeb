"""Training's rounds on a mesh: every worker contributes to each, and merges the same mean.

When a generation begins, workers that have what the reference has launch their open rounds again, among the new
members. A worker behind, or new, takes part in rounds with no contribution until the joint state has come, so that
nobody waits for it, and keeps their means: those after the state it is given are merged then.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.identity import Identity
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.notes import taken_of
from thinwire.exchange.rounds import Completed, Launch
from thinwire.exchange.signals import Landed, LeftOut
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.protocol.identifiers import before, train_number
from thinwire.protocol.messages import Commit
from thinwire.protocol.observation import Merged
from thinwire.rules.compression import codec
from thinwire.rules.finite import count_not_finite
from thinwire.rules.stillness import common, still
from thinwire.transport.ports import Link

KNOWS_ZERO = 4
"""Bits of a value from which on a codec has a code for zero."""


class Mesh(Member):
    """One worker's part in rounds of all workers."""

    def __init__(self, link: Link, seat: Identity, joint: JointState, **settings: Any) -> None:
        super().__init__(link, seat, joint, **settings)
        self._numbering = threading.Lock()
        self._next_round = joint.landed
        self._claimed: set[int] = set()
        """Rounds whose snapshots are on the way from the main thread."""
        self._ready: dict[int, Completed] = {}
        self._contributed: set[int] = set()
        self._values: dict[int, Tensor] = {}
        self._spares = BufferPool(joint.strategy.in_flight)

    def claim(self) -> tuple[int, Fragment]:
        with self._numbering:
            round = self._next_round
            self._next_round += 1
            self._claimed.add(round)
        return round, self._joint.fragment(round)

    @property
    def next_round(self) -> int:
        with self._numbering:
            return self._next_round

    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        values = None
        if snapshot is not None and weight > 0:
            spare = self._spares.take(fragment.size)
            taken = snapshot.take() if isinstance(snapshot, Snapshot) else snapshot
            values = self._joint.contribution(fragment, taken, out=spare)
            if values is None:
                self.signals.put(LeftOut(round, count_not_finite(taken), False))
                weight = 0.0
                note = {key: said for key, said in note.items() if key != "taken"}
                if spare is not None:
                    self._spares.give(spare)
            elif values is spare:  # until the round has landed: it may have to be launched again
                self._values[round] = spare
            moves = self._joint.strategy.joint_optimizer is None
            if values is not None and moves and codec(self._codec_of(round)).bits < KNOWS_ZERO:
                note = note | {"still": still(values, fragment.start)}
        with self._numbering:
            self._claimed.discard(round)
        self.launch(Launch(f"train:{round}", fragment, self._codec_of(round), values, weight, note))

    def _codec_of(self, round: int) -> str:
        return self._joint.cuts.at(round).setting.codec or self._codec_name

    # -- generations ------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._take_up_completed()

    def _over(self, landed: int) -> Callable[[str], bool]:
        return lambda key: before(key, landed)

    def _holds(self, commit: Commit) -> bool:
        if self.standing.fresh or self.standing.needs_state:
            return commit.landed == 0 and commit.digest == self.digest
        return self._joint.landed == commit.landed

    def _go_on(self, commit: Commit, given_up: list[Launch]) -> None:
        """Rounds that nobody landed start again; those that the reference landed are over."""
        landed = commit.landed
        for round in [r for r in {*self._values, *self._contributed} if r < landed]:
            self._forget(round)
        self._ready = {}
        held, self._held = self._held, deque()
        again = [launch for launch in [*given_up, *held] if not before(launch.key, landed)]
        with self._numbering:
            self._next_round = max(self._next_round, landed)
            known = {train_number(launch.key) for launch in again} | self._claimed
            gone = [] if self.standing.needs_state else [r for r in range(landed, self._next_round) if r not in known]
        for round in gone:  # dropped for a joint state that had them, and was lost with its holder: land without it
            again.append(self._without(round))
        for launch in sorted(again, key=lambda launch: train_number(launch.key) or 0):
            self._start_round(launch)

    def _loaded(self) -> None:
        with self._numbering:
            self._next_round = max(self._next_round, self._joint.landed)
            followed = set(range(self._joint.landed, self._next_round)) - self._claimed
        for round in [r for r in self._ready if r < self._joint.landed]:
            self._forget(round)
        for round in sorted(followed):  # whoever opened them may be gone, and nobody else would wait for this worker
            self._start_round(self._without(round))

    def _without(self, round: int) -> Launch:
        """A part in a round that gives nothing to it."""
        return Launch(f"train:{round}", self._joint.fragment(round), self._codec_of(round), None, 0.0, {})

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _start_round(self, launch: Launch) -> None:
        round = train_number(launch.key)
        if self._rounds.launch(launch) and round is not None and launch.values is not None:
            self._contributed.add(round)

    def _follow(self) -> None:
        wanted = self._rounds.wanted()
        trains = sorted(r for r in (train_number(key) for key, _, _ in wanted) if r is not None)
        for key, fragment, name in wanted:
            round = train_number(key)
            if round is None:
                follow = self._passes_over(key)
            else:
                behind = self._resend and round != trains[-1]  # a quorum went on without this worker
                lacks = self.standing.needs_state and not self.in_step
                follow = lacks or round < self.follows_until or behind
            if not follow:
                continue
            with self._numbering:
                if round is not None:
                    if self.follows_until <= round < self._next_round and not self.standing.needs_state:
                        continue  # claimed by the main thread: its snapshot is on the way
                    self._next_round = max(self._next_round, round + 1)
            self._rounds.launch(self._means.aside(key, fragment, name, self._note()))

    def _keep_still(self, done: Completed) -> None:
        """What no contributor has moved stays: a codec of signs makes something of every zero."""
        given = [n["still"] for worker, n in done.notes.items() if "still" in n and worker not in done.dropped]
        for start, stop in common(given):
            done.mean[max(0, start - done.fragment.start) : max(0, stop - done.fragment.start)] = 0.0

    def _land(self, round: int, done: Completed) -> Tensor:
        """Merges a round into the joint state; returns the reply, where the mean was."""
        if self._joint.strategy.joint_optimizer is None:
            self._keep_still(done)
            return self._joint.land(round, done.fragment, done.mean, out=done.mean)
        given = {worker: note for worker, note in done.notes.items() if worker not in done.dropped}
        taken = None if done.empty else taken_of(given, done.fragment)
        squares = [float(note["square"]) for note in given.values() if "square" in note]
        square = math.fsum(squares) / len(squares) if squares else None
        return self._joint.land_steps(round, done.fragment, done.mean, taken, out=done.mean, square=square)

    def _take_up_completed(self) -> None:
        super()._take_up_completed()
        self._land_ready()

    def _take_up(self, done: Completed) -> None:
        round = train_number(done.key)
        if round is None:
            super()._take_up(done)
            return
        self._ready[round] = done
        if round < self._joint.landed:  # the joint state that came from a peer had it already
            self._forget(round)

    def _forget(self, round: int) -> None:
        """Lets go of a round that is over."""
        self._ready.pop(round, None)
        self._contributed.discard(round)
        self._rounds.settle(f"train:{round}")
        if (values := self._values.pop(round, None)) is not None:
            self._spares.give(values)

    def _land_ready(self) -> None:
        while not self.standing.needs_state and self._joint.landed in self._ready:
            round = self._joint.landed
            done, own = self._ready[round], round in self._contributed
            snapshot = None if own else self._joint.old_model(done.fragment)
            reply = self._land(round, done)
            kept = () if self._joint.strategy.joint_optimizer is None else tuple(self._joint.state[1:])
            merged = Merged(self._rounds.generation, self._joint.landed, reply, self._joint.model, kept)
            self._joint.observe(merged)
            self._forget(round)
            publish = save = False
            for note in done.notes.values():
                if "setting" in note:
                    self._joint.change(note["setting"], int(note["since"]))
                publish |= "publish" in note
                save |= "save" in note
            model = self._joint.model
            if self._identity.worker in done.dropped and own:
                self.signals.put(LeftOut(round, 0, True))
            self.signals.put(
                Landed(
                    round=round,
                    fragment=done.fragment,
                    reply=reply,
                    snapshot=snapshot,
                    notes=done.notes,
                    model=model.clone() if publish and model is not None else None,
                    joint=self._joint.tree() if save else None,
                    seconds=done.seconds,
                    size_bytes=done.size_bytes,
                    empty=done.empty,
                )
            )
