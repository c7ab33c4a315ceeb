"""Training's rounds on a mesh: every worker contributes to each, and merges the same mean.

When a generation begins, workers that have what the reference has launch their open rounds again, among the new
members. A worker behind, or new, takes part in rounds with no contribution until the joint state has come, so that
nobody waits for it, and keeps their means: those after the state it is given are merged then.

A group that a generation formed without starts again from the joint model. What its members contributed to rounds that
have not landed counts for nothing, or the round would have it in some parts of the model and not in others:

1. group A has contributed to round 2, which group B has yet to launch; a member of A is lost
2. a generation forms without A; B goes on
3. A is whole again: the members that stayed still hold their contributions, the new member holds none
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.landing import Landing
from thinwire.exchange.ledger import RoundEvent, RoundState
from thinwire.exchange.means import Means
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Tree
from thinwire.exchange.residuals import resends
from thinwire.exchange.round import Launch
from thinwire.exchange.signals import Asked, LeftOut
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.station import Station
from thinwire.exchange.training import ModelHere, Training, Unfed
from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body
from thinwire.protocol.identifiers import train_number
from thinwire.protocol.messages import Commit
from thinwire.rules.compression import codec
from thinwire.rules.finite import count_not_finite
from thinwire.rules.stillness import still

KNOWS_ZERO = 4
"""Bits of a value from which on a codec has a code for zero."""
OF_VALUES = frozenset({"absent", "search", "square", "still", "taken"})
"""What notes say of the values that a worker contributes."""


def on_mesh(station: Station, means: Means) -> Training:
    """Training's traffic in rounds of all workers."""
    made = Mesh(station, means)
    return Training(launching=made, feeding=Unfed(), viewing=ModelHere(station), forming=made, turning=made)


class Mesh:
    """One worker's part in rounds of all workers."""

    def __init__(self, station: Station, means: Means) -> None:
        self._station, self._means, self._joint = station, means, station.joint
        self._rounds, self._standing = station.rounds, station.standing
        self._landing = Landing(station)
        self._resend = resends(station.joint.strategy)
        self._numbering = threading.Lock()
        self._next_round = station.joint.landed
        self.follows_until: float = 0
        """All, when its own rows are done."""
        self._in_step = False
        """Whether this worker launches all further rounds itself, also those that begin while it waits for the joint
        state: the other members of its group contribute to them."""
        self._left_out = False
        """Whether a generation formed without this worker's group, whose joint state has yet to come."""
        self.waiting_for: Callable[[], dict[str, list[int]]] = station.rounds.waiting_for

    # -- this worker's contributions --------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        with self._numbering:
            return self._next_round

    def claim(self) -> tuple[int, Fragment]:
        with self._numbering:
            round = self._next_round
            self._next_round += 1
            self._rounds.ledger.move(f"train:{round}", RoundEvent.CLAIM)
        return round, self._joint.fragment(round)

    def launch(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: Note
    ) -> None:
        own = Launch(f"train:{round}", fragment, self._codec_of(round), None, weight, note)
        if self._left_out:
            own = _withdrawn(own, self._rounds.buffers)
        elif snapshot is not None and weight > 0:
            buffer = self._rounds.buffers.take(fragment.size)
            taken = snapshot.take() if isinstance(snapshot, Snapshot) else snapshot
            values = self._joint.contribution(fragment, taken, out=buffer)
            own = own._replace(values=values, pooled=values is buffer)  # kept: it may have to be launched again
            if values is None:
                self._station.signals.put(LeftOut(round, count_not_finite(taken), False))
                own = own._replace(weight=0.0, note=_empty_handed(note))
                self._rounds.buffers.give(buffer)
            elif self._joint.strategy.joint_optimizer is None and codec(own.codec).bits < KNOWS_ZERO:
                own = own._replace(note=note | {"still": still(values, fragment.start)})
        if not self._station.launch(own) and own.pooled and own.values is not None:
            self._rounds.buffers.give(own.values)

    def follow(self, until: float, *, in_step: bool = False) -> None:
        self.follows_until, self._in_step = until, in_step

    def _codec_of(self, round: int) -> str:
        return self._joint.cuts.at(round).setting.codec or self._station.codec_name

    def _without(self, round: int) -> Launch:
        """A part in a round that gives nothing to it."""
        return Launch(f"train:{round}", self._joint.fragment(round), self._codec_of(round), None, 0.0, {})

    # -- generations ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        if not self._standing.frozen:
            self._take_up()

    def holds(self, commit: Commit) -> bool:
        if self._standing.fresh or self._standing.needs_state:
            return commit.landed == 0 and commit.digest == self._standing.digest
        return self._joint.landed == commit.landed

    def restarts(self, commit: Commit) -> bool:
        return False

    def go_on(self, commit: Commit, held: list[Launch]) -> None:
        """Rounds that no worker landed start again; those that the reference landed are over."""
        standing = self._standing
        self._left_out = commit.group is not None and standing.needs_state and standing.since < commit.since
        again = [_withdrawn(launch, self._rounds.buffers) for launch in held] if self._left_out else list(held)
        with self._numbering:
            self._next_round = max(self._next_round, commit.landed)
            gone = range(0) if self._standing.needs_state else range(commit.landed, self._next_round)
        for round in gone:  # dropped for a joint state that had them, and was lost with its holder: land without it
            if self._rounds.ledger.state(f"train:{round}") not in (RoundState.HELD, RoundState.CLAIMED):
                again.append(self._without(round))
        for launch in sorted(again, key=lambda launch: train_number(launch.key) or 0):
            self._rounds.launch(launch)

    def load(self, tree: Tree) -> None:
        joint = tree["joint"]
        assert isinstance(joint, dict)
        self._joint.load(joint)
        self._left_out = False
        with self._numbering:
            self._next_round = max(self._next_round, self._joint.landed)
            followed = range(self._joint.landed, self._next_round)
        for round in followed:  # the workers that opened them may be gone, and others would wait for this worker
            if self._rounds.ledger.state(f"train:{round}") is not RoundState.CLAIMED:
                self._rounds.launch(self._without(round))

    def caught(self) -> None:
        return

    def asked(self, peer: int) -> None:
        self._station.signals.put(Asked(peer, self._rounds.generation))

    # -- turns ------------------------------------------------------------------------------------------------------

    def receive(self, sender: int, body: Body, payload: memoryview | None) -> None:
        return

    def work(self) -> None:
        self._follow()
        self._rounds.tick()
        self._take_up()

    def close(self) -> None:
        return

    def _follow(self) -> None:
        """Takes part, with nothing, in rounds that others want and this worker's main thread does not."""
        wanted = self._rounds.wanted()
        trains = sorted(r for r in (train_number(key) for key, _, _ in wanted) if r is not None)
        for key, fragment, name in wanted:
            round = train_number(key)
            if round is None:
                follow = self._means.passes_over(key)
            else:
                behind = self._resend and round != trains[-1]  # a quorum went on without this worker
                lacks = self._standing.needs_state and not self._in_step
                follow = lacks or round < self.follows_until or behind
            if not follow:
                continue
            with self._numbering:
                if round is not None:
                    if self.follows_until <= round < self._next_round and not self._standing.needs_state:
                        continue  # claimed by the main thread: its snapshot is on the way
                    self._next_round = max(self._next_round, round + 1)
            self._rounds.launch(self._means.aside(key, fragment, name))

    def _take_up(self) -> None:
        for done in self._rounds.summed():
            round = train_number(done.key)
            if round is None:
                self._means.land(done)
            elif round < self._joint.landed:  # the joint state that came from a peer had it already
                self._rounds.drop(done.key)
        self._landing.land_all()


def _empty_handed(note: Note) -> Note:
    """A note that goes with no contribution: without what it says of one."""
    return {name: said for name, said in note.items() if name not in OF_VALUES}


def _withdrawn(own: Launch, buffers: BufferPool) -> Launch:
    """A part in a round, without what it contributed; what was said with it stands."""
    if own.pooled and own.values is not None:
        buffers.give(own.values)
    return own._replace(values=None, weight=0.0, note=_empty_handed(own.note), pooled=False)
