"""Peers turned by hand: no threads, so that one interleaving can be written down and kept."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.checkpoint import decode, encode
from thinwire.coordinator.membership import JointModelLost, Membership, Send
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.exchange.signals import Asked, Caught, Formed, Landed, Published, Signal
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.forms import header_of
from thinwire.protocol.messages import COORDINATOR, TO_COORDINATOR, Beat, Join, Message, Prepared
from thinwire.strategies import Strategy

SIZE = 2048


class HandLink:
    """Messages wait on their wire until the test delivers them."""

    def __init__(self, stage: Stage, me: int) -> None:
        self._stage, self._me = stage, me
        self.address = f"memory:{me}.0"
        self.refused = 0
        self.ready: list[Message] = []

    def connect(self, peers: Mapping[int, str]) -> None:
        pass

    def send(self, peer: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
        copied = None if payload is None else memoryview(bytearray(payload))
        kinds = self._stage.sent.setdefault(self._me, {})
        kinds[header["t"]] = kinds.get(header["t"], 0) + (0 if copied is None else copied.nbytes)
        message = Message(self._me, json.loads(json.dumps(header)), copied)
        self._stage.wires.setdefault((self._me, peer), deque()).append(message)

    def receive(self, timeout_s: float) -> list[Message]:
        found, self.ready = self.ready, []
        return found

    def traffic(self) -> None:
        return None

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stage:
    """Peers, the wires between them, and a coordinator that answers when it is asked to."""

    def __init__(
        self, workers: int, strategy: Strategy, *, size: int = SIZE, codec_name: str = "float32", settings: Any = None
    ) -> None:
        self.size, self.codec_name, self.settings = size, codec_name, settings or {}
        self.attempts = dict.fromkeys(range(workers), 0)
        self.wires: dict[tuple[int, int], deque[Message]] = {}
        self.sent: dict[int, dict[str, int]] = {}
        """Bytes of payload by sender and kind."""
        self.membership = Membership(workers, Deadlines(settle_s=0.0))
        self.peers: dict[int, Peer] = {}
        self.joints: dict[int, JointState] = {}
        self.signals: dict[int, list[Signal]] = {}
        self.claimed: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        """By worker, the rounds its main thread has claimed and not been told the end of."""
        self.ended: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        self.adopted = dict.fromkeys(range(workers), 0)
        self.now, self.bereft = 0.0, False
        self.hold_donations = False
        self.published = 0
        self.asked: list[tuple[int, Asked]] = []
        self.went: dict[int, tuple[int, int]] = dict.fromkeys(range(workers), (0, 0))
        for worker in range(workers):
            self.joints[worker] = JointState(strategy, torch.zeros(size), workers)
            self.peers[worker] = self._peer(worker, 0)
            self.peers[worker].member.standing.digest = "same"
            self.signals[worker] = []
            self._decide(self.membership.join(Join(attempt=0, address=f"memory:{worker}.0"), worker, self.now))
        self.coordinate()
        self.settle()

    def _peer(self, worker: int, attempt: int) -> Peer:
        link, seat, trees = HandLink(self, worker), Identity(worker, attempt, {}), TreeCodec(encode, decode)
        return Peer(link, seat, self.joints[worker], codec_name=self.codec_name, trees=trees, **self.settings)

    def coordinate(self) -> None:
        """The coordinator takes in what has come, and its answers reach the peers' inboxes."""
        for worker in self.peers:
            for message in self.wires.pop((worker, COORDINATOR), ()):
                body = TO_COORDINATOR.decode(message.header)
                if isinstance(body, Prepared):
                    self._decide(self.membership.prepared(body, worker, self.now))
        self._decide(self.membership.tick(self.now))

    def beat(self) -> None:
        """Every peer says that it lives, and what it waits for."""
        for worker, peer in self.peers.items():
            peer.member.beat()
            for message in self.wires.pop((worker, COORDINATOR), ()):
                body = TO_COORDINATOR.decode(message.header)
                if isinstance(body, Beat):
                    self.membership.beat(body, worker, self.now)

    def _decide(self, decisions: Any) -> None:
        for decision in decisions:
            self.bereft |= isinstance(decision, JointModelLost)
            if isinstance(decision, Send) and decision.worker in self.peers:
                header = json.loads(json.dumps(header_of(decision.body)))
                self.peers[decision.worker].member._link.ready.append(Message(COORDINATOR, header))

    def kill(self, worker: int) -> None:
        self.peers.pop(worker).member.close()
        for wire in [pair for pair in self.wires if pair[1] == worker]:
            self.wires.pop(wire)
        self._decide(self.membership.lose(worker, self.attempts[worker], "killed", self.now))

    def join(self, worker: int, attempt: int) -> None:
        """A worker comes that has no joint state yet."""
        strategy = next(iter(self.joints.values())).strategy
        self.joints[worker] = JointState(strategy, torch.zeros(self.size), 3)
        self.peers[worker] = self._peer(worker, attempt)
        self.attempts[worker] = attempt
        self.signals[worker], self.claimed[worker], self.ended[worker], self.adopted[worker] = [], set(), set(), 0
        self._decide(
            self.membership.join(Join(attempt=attempt, address=f"memory:{worker}.{attempt}"), worker, self.now)
        )

    def deliver(self, sender: int, receiver: int, kind: str | None = None) -> None:
        """Puts a wire's messages (of one kind, and those before them) into the receiver's inbox."""
        wire = self.wires.get((sender, receiver), deque())
        while wire and (kind is None or any(m.header["t"] == kind for m in wire)):
            self.peers[receiver].member._link.ready.append(wire.popleft())

    def turn(self, worker: int) -> None:
        peer = self.peers[worker]
        peer.member.turn()
        for signal in peer.signals():
            self.signals[worker].append(signal)
            if isinstance(signal, Asked):
                self.asked.append((worker, signal))
            elif isinstance(signal, Published):
                self.went[worker] = signal.name
            elif isinstance(signal, Formed):
                peer.put(signal.generation, None)
            elif isinstance(signal, Landed):
                assert signal.round == self.adopted[worker]
                self._end(worker, {signal.round}, signal.round + 1)
            elif isinstance(signal, Caught):
                landed = int(signal.tree["joint"]["landed"])
                self._end(worker, {r for r in self.claimed[worker] if r < landed}, landed)
        if not self.hold_donations:
            self.donate()

    def donate(self) -> None:
        """The main threads send the joint state to those who asked."""
        asked, self.asked = self.asked, []
        for worker, signal in asked:
            tree = {"joint": self.joints[worker].tree(), "published": self.published, "went": self.went[worker]}
            self.peers[worker].donate(signal.peer, tree, signal.generation)

    def _end(self, worker: int, rounds: set[int], adopted: int) -> None:
        self.claimed[worker] -= rounds
        self.ended[worker] |= rounds
        self.adopted[worker] = adopted

    def heard_of(self, worker: int) -> set[int]:
        """Rounds whose end the main thread was told: it waits for every round that it has claimed."""
        assert not self.claimed[worker], f"worker {worker} still waits for rounds {self.claimed[worker]}"
        return self.ended[worker]

    def may_claim(self, worker: int) -> bool:
        """Whether the main thread would claim a round now, were one due."""
        peer = self.peers[worker]
        return peer.next_round < self.adopted[worker] + self.joints[worker].strategy.in_flight

    def settle(self) -> None:
        """Delivers and turns until nothing moves."""
        for _ in range(30):
            for sender, receiver in list(self.wires):
                if receiver in self.peers:
                    self.deliver(sender, receiver)
            for worker in list(self.peers):
                self.turn(worker)
            self.coordinate()

    def launch(self, worker: int, value: float, note: dict[str, Any] | None = None) -> int:
        assert self.may_claim(worker)
        round, fragment = self.peers[worker].claim()
        self.claimed[worker].add(round)
        self.peers[worker].launch(round, fragment, torch.full((fragment.size,), value), 1.0, note or {})
        return round

    def close(self) -> None:
        for peer in self.peers.values():
            peer.member.close()

    def landed(self) -> list[int]:
        return [self.joints[worker].landed for worker in self.peers]

    def assert_same(self) -> None:
        models = [self.joints[worker].model for worker in self.peers]
        assert all(torch.equal(models[0], model) for model in models[1:])
