"""Real mesh peers over in-memory links, each with its thread: one joint model on all, whoever comes or goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from thinwire.checkpoint import decode, encode
from thinwire.coordinator.membership import Membership, Send
from thinwire.exchange.joint import JointState, slice_state, write_state
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.exchange.signals import Asked, Broken, Caught, Formed, Landed
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.forms import header_of
from thinwire.protocol.messages import TO_COORDINATOR, Beat, Join, Pong, Prepared
from thinwire.strategies import MPCA, DiLoCo, Relay, Share, SparkNet, Strategy, Synchronous
from thinwire.transport.memory import MemoryHub, MemoryLink, Room

SIZE = 1500
ROUNDS = 12
DEADLINE_S = 10.0

STRATEGIES: dict[str, Strategy] = {
    "synchronous": Synchronous(),
    "synchronous in int4": Synchronous(codec="int4"),
    "sparknet": SparkNet(period=1),
    "mpca with 1 fragment": MPCA(fragments=1),
    "mpca with 3 fragments": MPCA(),
    "diloco": DiLoCo(period=1),
    "diloco with fragments and overlap": DiLoCo(period=4, fragments=4, overlap=True),
    "relay": Relay(quorum=1.0),
    "relay in two bits": Relay(bits=2, fragments=3, quorum=1.0),
    "relay in one bit": Relay(bits=1, fragments=3, quorum=1.0),
    "relay with a quorum": Relay(bits=8, fragments=2, quorum=0.5, grace_s=0.05),
}


class Life:
    """What a worker's main thread does with its peer, as far as rounds are concerned, and nothing else."""

    def __init__(self, room: Room, worker: int, attempt: int, strategy: Strategy) -> None:
        self.worker, self.attempt, self.strategy = worker, attempt, strategy
        self.x = torch.zeros(SIZE)
        self.joint = JointState(strategy, self.x, 3)
        self.state = strategy.open(self.x)[1]
        self.peer = Peer(
            MemoryLink(room, me=worker, attempt=attempt),
            Identity(worker, attempt, {"host": "here"}),
            self.joint,
            codec_name="float32",
            trees=TreeCodec(encode, decode),
        )
        self.random = torch.Generator().manual_seed(100 * worker + attempt)
        self.snapshots: dict[int, Any] = {}
        self.replies: dict[int, torch.Tensor] = {}
        self.members: tuple[int, ...] = ()
        self.needs_state = True
        self.adopted = 0
        self.asked: list[Asked] = []
        self.caught = 0

    def step(self, until: int) -> None:
        """Takes up signals; when it may, makes a step and contributes to the next round before `until`."""
        for signal in self.peer.signals():
            self.take(signal)
        self.donate()
        ready = self.members and not self.needs_state
        if ready and self.peer.next_round < min(until, self.adopted + self.strategy.in_flight):
            self.x += torch.randn(SIZE, generator=self.random)
            round, fragment = self.peer.claim()
            snapshot = fragment.of(self.x).clone()
            self.snapshots[round] = (fragment, snapshot)
            weight = self.strategy.weight(Share(round, 1, 4 + self.worker, False))
            self.peer.launch(round, fragment, snapshot, weight, {"rows": round})

    def take(self, signal: Any) -> None:
        if isinstance(signal, Landed):
            fragment, snapshot = self.snapshots.pop(signal.round, (signal.fragment, None))
            base = signal.snapshot if signal.snapshot is not None else snapshot
            assert signal.round == self.adopted, f"round {signal.round} is told after {self.adopted} rounds"
            self.adopted = signal.round + 1
            self.replies[signal.round] = signal.reply.clone()
            if base is not None and self.strategy.subject == "parameters":
                piece = slice_state(self.state, fragment, SIZE)
                value, adopted = self.strategy.adopt(piece, fragment.of(self.x), base, signal.reply)
                fragment.of(self.x).copy_(value)
                self.state = write_state(self.state, fragment, SIZE, adopted)
        elif isinstance(signal, Formed):
            self.members, self.needs_state = signal.members, signal.needs_state
        elif isinstance(signal, Caught):
            self.needs_state = False
            self.caught += 1
            self.adopted = int(signal.tree["joint"]["landed"])
            self.snapshots = {r: kept for r, kept in self.snapshots.items() if r >= self.adopted}
        elif isinstance(signal, Asked):
            self.asked.append(signal)
        elif isinstance(signal, Broken):
            raise signal.error

    def donate(self) -> None:
        """Hands the joint state on once this replica has taken up all that is in it."""
        with self.joint.lock:
            if self.needs_state or self.joint.landed != self.adopted:
                return
            tree = {"joint": self.joint.tree()} if self.asked else {}
        while self.asked:
            asked = self.asked.pop()
            self.peer.donate(asked.peer, tree, asked.generation)


class Town:
    """Lives, and a coordinator that forms generations and does nothing else."""

    def __init__(self, workers: int, strategy: Strategy) -> None:
        self.room = Room()
        self.hub = MemoryHub(self.room)
        self.strategy = strategy
        self.membership = Membership(workers, Deadlines(settle_s=0.0, silence_s=1e6, prepare_s=1e6, start_s=1e6))
        self.lives: dict[int, Life] = {}
        self.all: list[Life] = []
        for worker in range(workers):
            self.move_in(worker)

    def move_in(self, worker: int, attempt: int = 0) -> None:
        self.lives[worker] = Life(self.room, worker, attempt, self.strategy)
        self.all.append(self.lives[worker])
        self.lives[worker].peer.start("same")

    def die(self, worker: int) -> None:
        """Ends a peer as a killed process would, and tells the coordinator."""
        gone = self.lives.pop(worker)
        gone.peer.close()
        self._decide(self.membership.lose(worker, gone.attempt, "killed", time.monotonic()))

    def coordinate(self) -> None:
        now = time.monotonic()
        for sender, header, _ in self.hub.receive(0.001):
            body = TO_COORDINATOR.decode(header)
            if isinstance(body, Join):
                self._decide(self.membership.join(body, sender, now))
            elif isinstance(body, Prepared):
                self._decide(self.membership.prepared(body, sender, now))
            elif isinstance(body, Beat) and self.membership.beat(body, sender, now):
                self.hub.send(sender, body.attempt, header_of(Pong()))
        self._decide(self.membership.tick(now))

    def _decide(self, decisions: Any) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                self.hub.send(decision.worker, decision.attempt, header_of(decision.body))

    def live_until(self, rounds: int) -> None:
        """Everyone works until all have landed so many rounds."""
        deadline = time.monotonic() + DEADLINE_S
        while any(life.joint.landed < rounds or life.needs_state for life in self.lives.values()):
            assert time.monotonic() < deadline, self.status()
            self.coordinate()
            for life in self.lives.values():
                life.step(rounds)

    def status(self) -> dict[int, Any]:
        return {w: (i.joint.landed, i.members, i.needs_state, sorted(i.snapshots)) for w, i in self.lives.items()}

    def assert_same(self) -> None:
        trees = [life.joint.tree() for _, life in sorted(self.lives.items())]
        for other in trees[1:]:
            assert other["landed"] == trees[0]["landed"]
            assert other["cuts"] == trees[0]["cuts"]
            for mine, theirs in zip(trees[0]["state"], other["state"], strict=True):
                assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))

    def assert_same_replies(self) -> None:
        for life in self.lives.values():
            for signal in life.peer.signals():
                life.take(signal)
        rounds = set.intersection(*(set(life.replies) for life in self.lives.values()))
        assert rounds
        first, *others = self.lives.values()
        assert all(torch.equal(first.replies[r], other.replies[r]) for other in others for r in rounds)

    def close(self) -> None:
        for life in self.all:
            life.peer.close()


@pytest.fixture
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    built = Town(3, STRATEGIES[request.param])
    yield built
    built.close()


every_strategy = pytest.mark.parametrize("town", STRATEGIES, indirect=True)


@every_strategy
def test_after_rounds_the_joint_state_is_the_same_bits_on_all(town: Town) -> None:
    town.live_until(ROUNDS)
    town.assert_same()
    town.assert_same_replies()
    assert not any(life.caught for life in town.lives.values())


@every_strategy
def test_a_replacement_ends_up_with_the_joint_state_of_those_who_went_on(town: Town) -> None:
    town.live_until(4)
    town.die(1)
    town.live_until(8)
    town.assert_same()
    town.move_in(1, attempt=1)
    town.live_until(9)
    deadline = time.monotonic() + DEADLINE_S
    rounds = 9
    while not all(life.members == (0, 1, 2) and not life.needs_state for life in town.lives.values()):
        assert time.monotonic() < deadline, town.status()
        rounds += 1
        town.live_until(rounds)
    town.live_until(rounds + 6)
    town.assert_same()
    town.assert_same_replies()
    assert town.lives[1].caught == 1


@every_strategy
def test_a_death_with_rounds_in_flight_stops_nobody(town: Town) -> None:
    town.live_until(3)
    for life in town.lives.values():
        life.step(100)
    town.die(0)  # the lead
    town.live_until(ROUNDS)
    town.assert_same()
    town.assert_same_replies()
    town.die(2)
    town.live_until(ROUNDS + 4)
    assert town.lives[1].members == (1,)


def test_a_worker_that_starts_from_another_model_takes_over_the_reference_s() -> None:
    town = Town(2, SparkNet(period=1))
    try:
        town.lives[1].joint.set_model(torch.ones(SIZE))
        town.lives[1].peer.member.standing.digest = "other"
        town.live_until(3)
        town.assert_same()
    finally:
        town.close()


def test_a_mean_asked_for_once_comes_to_all() -> None:
    town = Town(3, SparkNet(period=1))
    try:
        town.live_until(1)
        for worker, life in town.lives.items():
            life.peer.average("buffers:1", torch.full((5,), float(worker)), 1.0, {"counts": [worker]})
        found: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(found) < 3:
            assert time.monotonic() < deadline
            town.coordinate()
            for worker, life in town.lives.items():
                for signal in life.peer.signals():
                    if type(signal).__name__ == "Averaged":
                        found[worker] = signal
        assert all(torch.equal(signal.mean, torch.ones(5)) for signal in found.values())
        assert all(signal.notes == {w: {"counts": [w]} for w in range(3)} for signal in found.values())
    finally:
        town.close()
