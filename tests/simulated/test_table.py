"""The table under random schedules: no update is lost, doubled or torn, whatever comes in between.

Each update is a one in a place of its own in every tuple, and a server adds what it gets: what it has merged, and how
often, can be read off the joint model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.exchange.peer import Peer
from thinwire.exchange.signals import Averaged, Formed, Landed, Published
from thinwire.exchange.table.table import Table, on_table
from thinwire.strategies import Joint, Progress, Served, Setting

from .stage import Stage

WORKERS, TUPLES, ROUNDS = 3, 6, 24
PLACES = WORKERS * 4 * ROUNDS
"""Of each tuple: for every worker, so many attempts and rounds."""


@dataclass(frozen=True, kw_only=True)
class Adding(Served):
    """Servers add what they are sent, and send it back."""

    def due(self, progress: Progress) -> bool:
        return False

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Joint]:
        return mean.clone(), Joint(joint.model + mean)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return x, worker


def part(peer: Peer) -> Table:
    """A peer's part in the table."""
    found = peer.member.training.forming
    assert isinstance(found, Table)
    return found


class Tables(Stage):
    """Table peers, each of which may have one update under way."""

    def __init__(self, seed: int, workers: int = WORKERS, **knobs: Any) -> None:
        self.random = random.Random(seed)
        strategy = Adding(tuple_size=PLACES, log_every=4, **knobs)
        self.senders = range(workers)
        settings = {"kind": on_table(workers=workers)}
        super().__init__(workers + strategy.helpers, strategy, size=TUPLES * PLACES, settings=settings)

    def place(self, worker: int, round: int) -> int:
        return (worker * 4 + self.attempts[worker]) * ROUNDS + round

    def send(self, worker: int) -> None:
        peer = self.peers[worker]
        if worker not in self.senders:
            return
        if self.claimed[worker] or peer.next_round >= ROUNDS or not peer.member.rounds.members:
            return
        round, fragment = peer.claim()
        self.claimed[worker].add(round)
        values = torch.zeros(TUPLES, PLACES)
        values[:, self.place(worker, round)] = 1.0
        peer.launch(round, fragment, values.flatten(), 1.0, {})

    def shake(self, moves: int) -> None:
        """Delivers, turns and sends at random."""
        for _ in range(moves):
            wires = [pair for pair, wire in self.wires.items() if wire and pair[1] in self.peers]
            act = self.random.random()
            if wires and act < 0.5:
                sender, receiver = self.random.choice(wires)
                self.peers[receiver].member._link.ready.append(self.wires[sender, receiver].popleft())
            elif act < 0.85:
                self.turn(self.random.choice(list(self.peers)))
            elif act < 0.95:
                self.send(self.random.choice(list(self.peers)))
            else:
                self.coordinate()

    def table(self) -> Tensor:
        """The joint model as its hosts have it: a row for each tuple."""
        found = torch.full((TUPLES, PLACES), float("nan"))
        for worker, peer in self.peers.items():
            table = part(peer)
            model = self.joints[worker].model
            assert model is not None
            for key in table.server.books:
                found[key] = table.layout.fragments[key].of(model)
        return found

    def assert_sound(self) -> Tensor:
        """Every update was merged once or not at all, in each tuple."""
        found = self.table()
        assert not found.isnan().any(), "every tuple has a host"
        assert set(found.unique().tolist()) <= {0.0, 1.0}, "none was merged twice"
        return found


@pytest.fixture
def tables() -> Iterator[Callable[..., Tables]]:
    """Makes stages, and closes them."""
    made: list[Tables] = []

    def make(seed: int, **knobs: Any) -> Tables:
        made.append(Tables(seed, **knobs))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def seeds(count: int) -> list[int]:
    return list(range(count))


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("servers", [1, 2, "spread", "driver"])
def test_every_update_is_merged_once_in_every_tuple(tables: Any, seed: int, servers: Any) -> None:
    stage = tables(seed, servers=servers)
    stage.shake(600)
    stage.settle()
    found = stage.assert_sound()
    sent = {stage.place(w, r) for w in stage.peers for r in stage.heard_of(w)}
    assert sent
    assert {p for p in range(PLACES) if found[:, p].all()} == sent
    assert not found[:, [p for p in range(PLACES) if p not in sent]].any(), "nothing is torn"


@pytest.mark.parametrize("seed", seeds(40))
def test_a_worker_that_joins_or_goes_in_peace_costs_no_update(tables: Any, seed: int) -> None:
    """A generation of the same members, called at any moment, moves nothing and loses nothing."""
    stage = tables(seed)
    for _ in range(4):
        stage.shake(150)
        stage.membership.agreement.change(stage.now)
        stage.shake(20)
    stage.settle()
    found = stage.assert_sound()
    sent = {stage.place(w, r) for w in stage.peers for r in stage.heard_of(w)}
    assert {p for p in range(PLACES) if found[:, p].all()} == sent
    assert not found[:, [p for p in range(PLACES) if p not in sent]].any()


@pytest.mark.parametrize("seed", seeds(60))
def test_a_server_that_is_killed_takes_all_back_to_the_last_complete_checkpoint(tables: Any, seed: int) -> None:
    stage = tables(seed)
    stage.shake(stage.random.randint(100, 600))
    victim = stage.random.randrange(WORKERS)
    stage.kill(victim)
    stage.shake(stage.random.randint(0, 200))
    stage.settle()
    found = stage.assert_sound()
    versions = {book.version for peer in stage.peers.values() for book in part(peer).server.books.values()}
    assert max(versions) - min(versions) <= WORKERS, "they went back together"
    for worker in stage.peers:
        assert not stage.claimed[worker], "nobody waits for a reply that never comes"
    before = found.sum()
    for worker in stage.peers:
        stage.send(worker)
    stage.settle()
    assert stage.assert_sound().sum() == before + TUPLES * len(stage.peers), "the run goes on"


@pytest.mark.parametrize("seed", seeds(20))
def test_a_server_beside_the_driver_that_is_killed_leaves_its_tuples_to_a_worker(tables: Any, seed: int) -> None:
    stage = tables(seed, servers="driver")
    assert set(part(stage.peers[WORKERS]).server.books) == set(range(TUPLES))
    stage.shake(stage.random.randint(100, 600))
    stage.kill(WORKERS)
    stage.shake(stage.random.randint(0, 200))
    stage.settle()
    before = stage.assert_sound().sum()
    assert set(part(stage.peers[0]).server.books) == set(range(TUPLES))
    for worker in stage.peers:
        stage.send(worker)
    stage.settle()
    assert stage.assert_sound().sum() == before + TUPLES * len(stage.peers), "the run goes on"
    stage.join(WORKERS, 1)
    stage.settle()
    assert set(part(stage.peers[WORKERS]).server.books) == set(range(TUPLES)), "and they go back to it"
    assert stage.assert_sound().sum() == before + TUPLES * len(stage.peers) - TUPLES, "as they were"


def test_recovery_moves_what_the_lost_server_had_and_no_more(tables: Any) -> None:
    """No worker sends more than the lost server's share and its own, however large the model is."""
    stage = tables(0)
    for _ in range(4):
        for worker in range(WORKERS):
            stage.send(worker)
        stage.settle()
    share = 4 * PLACES * TUPLES / WORKERS
    for happens in (lambda: stage.kill(1), lambda: stage.join(1, 1)):
        stage.sent = {}
        happens()
        stage.settle()
        moved = {worker: sum(kinds.get(k, 0) for k in ("move", "copy")) for worker, kinds in stage.sent.items()}
        assert max(moved.values()) <= 2.5 * share, moved
    assert sum(kinds.get("move", 0) for kinds in stage.sent.values()) <= 1.5 * share, "what was its own comes back"


@pytest.mark.parametrize("seed", seeds(40))
def test_what_a_complete_checkpoint_holds_survives_a_kill(tables: Any, seed: int) -> None:
    """All is quiet when a checkpoint is taken, so that what is in it is known."""
    stage = tables(seed)
    for _ in range(4):  # twelve updates of each tuple: a checkpoint at the eighth and at the twelfth
        for worker in range(WORKERS):
            stage.send(worker)
        stage.settle()
    whole = stage.assert_sound()
    stage.kill(stage.random.randrange(WORKERS))
    stage.shake(50)
    stage.settle()
    assert torch.equal(stage.assert_sound() * whole, whole)


@pytest.mark.parametrize("seed", seeds(60))
def test_lives_and_deaths_leave_a_sound_table_and_nobody_waiting(tables: Any, seed: int) -> None:
    stage = tables(seed)
    for _ in range(6):
        stage.shake(stage.random.randint(20, 200))
        gone = [w for w in range(WORKERS) if w not in stage.peers]
        if gone and stage.random.random() < 0.6:
            stage.join(gone[0], stage.attempts[gone[0]] + 1)
        elif len(stage.peers) > 1:
            stage.kill(stage.random.choice(list(stage.peers)))
    stage.settle()
    stage.settle()
    if len(stage.peers) == 1 or stage.bereft:
        return  # a lone worker's replica is the joint model; without anybody who holds it the run ends
    stage.assert_sound()
    sent = []
    for worker, peer in stage.peers.items():
        assert not stage.claimed[worker]
        if peer.next_round < ROUNDS:
            sent.append(stage.place(worker, peer.next_round))
            stage.send(worker)
    stage.settle()
    assert stage.assert_sound()[:, sent].all(), "what is sent now arrives"


@pytest.mark.parametrize("seed", seeds(40))
def test_a_publication_is_the_same_copy_everywhere_or_nowhere(tables: Any, seed: int) -> None:
    stage = tables(seed)
    stage.shake(200)
    lead = min(stage.peers)
    for number in range(3):
        stage.peers[lead].announce({"publish": number, "evaluate": True})
        stage.shake(stage.random.randint(0, 120))
        if number == 1:
            stage.kill(max(stage.peers))
    stage.settle()
    heard = {w: [s for s in stage.signals[w] if isinstance(s, Published)] for w in stage.peers}
    assert [p.note["publish"] for p in heard[lead]] == [0, 1, 2]
    for worker in stage.peers:
        assert [p.note for p in heard[worker]] == [p.note for p in heard[lead]]
        for mine, theirs in zip(heard[worker], heard[lead], strict=True):
            assert torch.equal(mine.model, theirs.model)


def test_a_view_is_the_whole_joint_model(tables: Any) -> None:
    stage = tables(0)
    for worker in range(WORKERS):
        stage.send(worker)
    stage.settle()
    for worker in range(WORKERS):
        stage.peers[worker].view("joint:final")
    stage.settle()
    whole = stage.assert_sound().flatten()
    for worker in range(WORKERS):
        (seen,) = [s for s in stage.signals[worker] if isinstance(s, Averaged)]
        assert torch.equal(seen.mean, whole)


def test_a_reborn_worker_s_joint_state_is_that_of_the_servers(tables: Any) -> None:
    stage = tables(0)
    for _ in range(2):
        for worker in range(WORKERS):
            stage.send(worker)
        stage.settle()
    stage.kill(1)
    stage.settle()
    stage.join(1, 1)
    stage.settle()
    assert torch.equal(stage.joints[1].model, stage.assert_sound().flatten())
    assert [s.restart for w in (0, 2) for s in stage.signals[w] if isinstance(s, Formed)] == [False] * 6


@pytest.mark.parametrize("seed", seeds(10))
def test_replies_come_in_the_order_of_updates(tables: Any, seed: int) -> None:
    stage = tables(seed)
    stage.shake(800)
    for worker in stage.peers:
        rounds = [s.round for s in stage.signals[worker] if isinstance(s, Landed)]
        assert rounds == sorted(rounds)
