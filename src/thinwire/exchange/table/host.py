"""The servers' half of a table: the tuples that a worker hosts, and how they come to it when a generation begins.

All members work out from the same answers where each server's tuples come from (`plan`): they are still there; or a
host is gone, and all servers go back to the last checkpoint that is complete, of which every host's neighbour keeps a
copy; or there is none, and the reference puts in what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.station import Station
from thinwire.exchange.table.copies import Copies
from thinwire.exchange.table.plan import Answer, Layout, Plan, plan
from thinwire.exchange.table.server import Book, Held, Reply, Server, Update
from thinwire.protocol import messages
from thinwire.protocol.messages import Commit, Idle, Move, Moved
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.strategies import Served


class Host:
    """One worker as a host of tuples.

    Args:
        station: the worker that this host belongs to.
        layout: which tuples there are.
        workers: replicas of the run.
        landed: takes a reply to an update of this worker's own.
        complete: called when the last tuple that is hosted here has arrived.
    """

    def __init__(
        self,
        station: Station,
        layout: Layout,
        workers: int,
        *,
        landed: Callable[[Reply], None],
        complete: Callable[[], None],
    ) -> None:
        strategy = station.joint.strategy
        assert isinstance(strategy, Served)
        self._station, self._layout, self._landed, self._complete = station, layout, landed, complete
        self._group_of = strategy.group_of
        self.server = Server(station.joint, layout, self._keep)
        self.copies = Copies(station, layout, strategy.log_period(workers))
        self._pool = station.time.executor("exchanger", strategy.exchangers) if strategy.exchangers else None
        self._running: set[Future[list[Reply]]] = set()
        self.plan: Plan | None = None
        self.awaited: set[int] = set()
        """Tuples hosted here that are still on their way."""
        self._moving: dict[int, dict[str, Any]] = {}
        """Tuples sent on to another host that has not said that they arrived."""
        self._came: set[int] = set()
        self._done: set[int] = set()
        """Members whose rows are done: no server waits for their contributions."""

    def close(self) -> None:
        """Ends its threads and drops its checkpoints."""
        if self._pool is not None:
            self._pool.shutdown()
        self.copies.clear()

    # -- generations ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for updates that other threads are making, and answers them."""
        while True:
            for running in list(self._running):
                running.result()
            self._station.obey()
            if not self._running:
                return
            time.sleep(0.0005)  # its end is about to be told

    def answer(self) -> dict[str, Any]:
        """What this worker says of its tuples when a generation is about to form."""
        generation = self._station.rounds.generation
        if len(self._station.rounds.members) < 2:  # then the replica was the joint model, whatever is in the table
            return Answer(generation, 0, (), (), (), {}).to_json()
        hosted = self.plan.hosted_by(self._station.worker) if self.plan else []
        line, keys = self.plan.line if self.plan else 0, self._layout.keys
        due = tuple(s for s in hosted if self.awaited & set(keys(s)))
        still = {self._layout.server_of[key] for key in self._moving}
        whole = tuple(s for s in still if all(key in self._moving for key in keys(s)))
        live = tuple(s for s in hosted if s not in due)
        return Answer(generation, line, live, due, whole, self.copies.kept()).to_json()

    def restarts(self, commit: Commit) -> bool:
        """Makes the generation's plan; whether this worker's replica takes the place of a joint model that is lost."""
        answers = {worker: Answer.from_json(answer) for worker, answer in commit.tables.items()}
        self.plan = plan(
            self._layout,
            self._station.rounds.members,
            answers,
            reference=commit.reference,
            generation=commit.generation,
        )
        return self.plan.kind == "put" and commit.since > 0 and commit.reference == self._station.worker

    def bring(self) -> None:
        """Brings tuples to where the plan has them; hosts that lack some wait for them."""
        found, moving = self.plan, self._moving
        assert found is not None
        self._moving, self._came = {}, set()
        if found.kind == "put":
            self.copies.clear()  # of another model's line
        members = set(self._station.rounds.members)
        self._done &= members
        for gone in {w for book in self.server.books.values() for w in book.replies} - members:
            self.server.forget(gone)
        me = self._station.worker
        hosted = {key for server in found.hosted_by(me) for key in self._layout.keys(server)}
        waits = found.kind != "live"
        self.awaited = {key for key in hosted if waits or found.source[self._layout.server_of[key]] != me}
        for server, source in enumerate(found.source):
            if source == me and found.kind != "put":  # put: once the main thread has seen to the joint state
                self._send_on(server, found, moving)
        self.server.books = {key: book for key, book in self.server.books.items() if key in hosted}
        for book in self.server.books.values():
            book.pending.clear()  # their senders send them again
            book.held.clear()
        if found.kind == "live":
            self.copies.send_newest(found.hosted_by(me))
        self._count()

    def _send_on(self, server: int, found: Plan, moving: dict[int, dict[str, Any]]) -> None:
        """Gives a server's tuples, which come from here, to the server's host."""
        keys = self._layout.keys(server)
        if found.mark is not None:
            for key, tree in self.copies.read(server, found.mark).items() if keys else ():
                self._hand(key, tree)
        elif found.host[server] != self._station.worker or any(key not in self.server.books for key in keys):
            for key in keys:
                self._hand(key, moving[key] if key in moving else self.server.tree(key))

    def open(self, generation: int, model: Tensor | None) -> None:
        """Puts in what the main thread goes on with, where this worker is the reference and all else is lost."""
        found, joint = self.plan, self._station.joint
        reference = self._station.standing.reference == self._station.worker
        if generation == self._station.rounds.generation and found is not None and found.kind == "put" and reference:
            if model is not None:
                joint.set_model(model)
            for key in range(len(self._layout.fragments)):
                self._hand(key, self.server.tree(key, Book(joint.version, behind=dict(joint.behind))))

    def _hand(self, key: int, tree: dict[str, Any]) -> None:
        """Gives a tuple to its host."""
        host = self.of(key)
        if host == self._station.worker:
            self._take_over(key, tree)
        else:
            self._moving[key] = tree
            self._station.tell(host, Move, memoryview(self._station.trees.encode(tree)), key=key)

    def _take_over(self, key: int, tree: dict[str, Any]) -> None:
        self.server.put(key, tree)
        self.awaited.discard(key)
        assert self.plan is not None
        if self.plan.kind != "live":  # a new line begins: its first checkpoint
            self._keep(key, self.server.books[key], always=True)
        if not self.awaited:
            self._complete()

    def _keep(self, key: int, book: Book, *, always: bool = False) -> None:
        """Checkpoints a tuple when it is time: here, and with the neighbour that would take over."""
        if always or self.server.handlers.checkpoint_now(Held(self.server, key, book), self.copies.log_every):
            self.copies.keep(key, book, self.server, self.plan)

    def of(self, key: int) -> int:
        """The worker that hosts a tuple."""
        assert self.plan is not None
        return self.plan.host[self._layout.server_of[key]]

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_move(self, sender: int, move: Move, payload: memoryview | None) -> None:
        key = self._layout.key(move.key)
        tree = self._station.trees.decode(bytes(payload or b""))
        if key in self.awaited and isinstance(tree, dict):
            self._take_over(key, tree)
        self._station.tell(sender, Moved, key=key)

    def on_moved(self, sender: int, moved: Moved, payload: memoryview | None) -> None:
        """Once all tuples of a server have arrived at its host, they need not be kept here."""
        key = self._layout.key(moved.key)
        server = self._layout.server_of[key]
        self._came.add(key)
        if self._came.issuperset(self._layout.keys(server)):
            self._moving = {key: tree for key, tree in self._moving.items() if self._layout.server_of[key] != server}

    def on_idle(self, sender: int, idle: Idle, payload: memoryview | None) -> None:
        (self._done.add if idle.done else self._done.discard)(sender)
        self._count()

    # -- updates ----------------------------------------------------------------------------------------------------

    def on_update(self, sender: int, sent: messages.Update, payload: memoryview | None) -> None:
        key, weight = self._layout.key(sent.key), sent.weight
        if not 0.0 <= weight < 1e30 or key not in self.server.books or (payload is None) != (weight == 0.0):
            raise ValueError(f"update of {key}")
        values = torch.zeros(0) if payload is None else as_values(payload, self._layout.fragments[key].size)
        if not is_finite(values):
            flaws = count_not_finite(values)
            self._station.tell_not_finite(sender, f"table:{sent.number}", "contribution", flaws)
            weight = 0.0
        update = Update(sender, (sent.attempt, sent.number), weight, values, sent.rates, frozenset(sent.absent))
        if sent.over:
            self.server.pass_over(key, update)
        if sender in self._done:
            self._done.discard(sender)
            self._count()
        if self._pool is None:
            self._answer(self.server.update(key, update))
            return
        running = self._pool.submit(self.server.update_without_locks, key, update)
        self._running.add(running)
        running.add_done_callback(lambda done: self._station.command(lambda: self._ended(done)))

    def _ended(self, done: Future[list[Reply]]) -> None:
        self._running.discard(done)
        self._answer(done.result())

    def _answer(self, replies: list[Reply]) -> None:
        for reply in replies:
            if reply.worker == self._station.worker:
                self._landed(reply)
                continue
            self._station.tell(
                reply.worker,
                messages.Reply,
                None if reply.values is None else reply.values.numpy().data,
                key=reply.key,
                number=reply.number,
                version=reply.version,
                to=reply.attempt,
                empty=reply.values is None,
            )

    def _count(self) -> None:
        """Tells the servers here whose contributions to wait for."""
        groups: dict[int, set[int]] = {}
        for worker in self._station.rounds.members:
            if worker not in self._done:
                groups.setdefault(self._group_of(worker), set()).add(worker)
        self._answer(self.server.wants(groups))


def as_values(payload: memoryview | None, size: int) -> Tensor:
    """A payload as float32 values; it must have exactly `size` of them."""
    if payload is None or payload.nbytes != 4 * size:
        raise ValueError(f"{0 if payload is None else payload.nbytes} bytes where {4 * size} belong")
    return torch.frombuffer(payload, dtype=torch.float32)
