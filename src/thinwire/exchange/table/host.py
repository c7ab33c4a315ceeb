"""The servers' half of a table: the tuples that a worker hosts, and how they come to it when a generation begins.

All members work out from the same answers where each server's tuples come from (`plan`): they are still there; or a
host is gone, and all servers go back to the last checkpoint that is complete, of which every host's neighbour keeps a
copy; or there is none, and the reference puts in what it has.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.identity import Identity
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.signals import Broken
from thinwire.exchange.table.log import Log
from thinwire.exchange.table.plan import Answer, Layout, Line, Plan, plan
from thinwire.exchange.table.server import Book, Held, Reply, Server, Update
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import Commit, Copy, Get, Idle, Mark, Move, Moved, Value
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.rules.table import keeper
from thinwire.strategies import Served
from thinwire.transport.ports import Link

MOST_QUEUED = 1 << 16
WAITS = (messages.Update, Get, Mark)
"""What a host can only answer when all its tuples are there."""


class Heard(NamedTuple):
    """A message of a worker, this one among them."""

    sender: int
    body: Any
    payload: memoryview | None


class Host(Member):
    """One worker as a host of tuples."""

    def __init__(
        self,
        link: Link,
        seat: Identity,
        joint: JointState,
        *,
        workers: int,
        borders: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(link, seat, joint, **settings)
        strategy = joint.strategy
        assert isinstance(strategy, Served)
        first = workers if strategy.helpers else 0
        self.layout = Layout(borders or (0, joint.size), strategy.servers_of(workers), strategy.tuple_size, first)
        self._group_of = strategy.group_of
        self.server = Server(joint, self.layout, self._keep)
        self._log, self._log_every = Log(self.layout, self._trees), strategy.log_period(workers)
        self._pool = self.time.executor("exchanger", strategy.exchangers) if strategy.exchangers else None
        self._running: set[Future[list[Reply]]] = set()
        self._plan: Plan | None = None
        self._awaited: set[int] = set()
        """Tuples hosted here that are still on their way."""
        self._moving: dict[int, dict[str, Any]] = {}
        """Tuples sent on to another host that has not said that they came."""
        self._came: set[int] = set()
        self._queue: deque[Heard] = deque()
        self._early: list[Heard] = []
        self._done: set[int] = set()
        """Members whose rows are done: nobody waits for their contributions."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._log.clear()

    @abstractmethod
    def _landed(self, reply: Reply) -> None:
        """A reply to this worker's own update."""

    # -- generations ------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._take_up_completed()
        self._frozen = True  # so that nothing new is begun
        self._settle()

    def _settle(self) -> None:
        """Waits for updates that other threads are making, and answers them."""
        while True:
            for running in list(self._running):
                running.result()
            while self._commands:
                self._commands.popleft()()
            if not self._running:
                return
            time.sleep(0.0005)  # its end is about to be told

    def _answer_of_table(self) -> dict[str, Any]:
        generation = self._rounds.generation
        if len(self._rounds.members) < 2:  # then the replica was the joint model, whatever is in the table
            return Answer(generation, 0, (), (), (), {}).to_json()
        hosted, line = self._hosted(), self._plan.line if self._plan else 0
        due = tuple(s for s in hosted if self._awaited & set(self.layout.keys(s)))
        still = {self.layout.server_of[key] for key in self._moving}
        whole = tuple(s for s in still if all(key in self._moving for key in self.layout.keys(s)))
        live = tuple(s for s in hosted if s not in due)
        return Answer(generation, line, live, due, whole, self._log.kept()).to_json()

    def _hosted(self) -> list[int]:
        host = self._plan.host if self._plan else ()
        return [server for server, worker in enumerate(host) if worker == self._identity.worker]

    def _restarts(self, commit: Commit) -> bool:
        """Makes the generation's plan."""
        answers = {worker: Answer.from_json(answer) for worker, answer in commit.tables.items()}
        self._plan = plan(
            self.layout,
            self._rounds.members,
            answers,
            reference=commit.reference,
            generation=commit.generation,
        )
        return self._plan.kind == "put" and commit.since > 0 and commit.reference == self._identity.worker

    def _bring(self) -> None:
        """Brings tuples to where the plan has them; hosts that lack some wait for them."""
        me, found, moving = self._identity.worker, self._plan, self._moving
        assert found is not None
        self._queue.clear()
        self._moving, self._came = {}, set()
        if found.kind == "put":
            self._log.clear()  # of another model's line
        self._done &= set(self._rounds.members)
        for gone in {w for book in self.server.books.values() for w in book.replies} - set(self._rounds.members):
            self.server.forget(gone)
        hosted = {key for server in self._hosted() for key in self.layout.keys(server)}
        waits = found.kind != "live"
        self._awaited = {key for key in hosted if waits or found.source[self.layout.server_of[key]] != me}
        for server, source in enumerate(found.source):
            if source != me or found.kind == "put":  # put: once the main thread has seen to the joint state
                continue
            if found.mark is not None:
                for key, tree in self._log.read(server, found.mark).items() if self.layout.keys(server) else ():
                    self._hand(key, tree)
            elif found.host[server] != me or any(key not in self.server.books for key in self.layout.keys(server)):
                for key in self.layout.keys(server):
                    self._hand(key, moving[key] if key in moving else self.server.tree(key))
        self.server.books = {key: book for key, book in self.server.books.items() if key in hosted}
        for book in self.server.books.values():
            book.pending.clear()  # whoever sent them sends them again
            book.held.clear()
        if found.kind == "live":
            self._copy_checkpoints()
        self._count()

    def open(self, generation: int, model: Tensor | None) -> None:
        """Puts in what the main thread goes on with, where this worker is the reference and all else is lost."""
        found, reference = self._plan, self._agreed[0] == self._identity.worker
        if generation == self._rounds.generation and found is not None and found.kind == "put" and reference:
            if model is not None:
                self._joint.set_model(model)
            for key in range(len(self.layout.fragments)):
                self._hand(key, self.server.tree(key, Book(self._joint.version, behind=dict(self._joint.behind))))

    def _hand(self, key: int, tree: dict[str, Any]) -> None:
        """Gives a tuple to its host."""
        host = self.host(key)
        if host == self._identity.worker:
            self._take_over(key, tree)
        else:
            self._moving[key] = tree
            self._tell(host, Move, memoryview(self._trees.encode(tree)), key=key)

    def _take_over(self, key: int, tree: dict[str, Any]) -> None:
        self.server.put(key, tree)
        self._awaited.discard(key)
        assert self._plan is not None
        if self._plan.kind != "live":  # a new line begins: its first checkpoint
            self._keep(key, self.server.books[key], always=True)
        if not self._awaited:
            queued, self._queue = self._queue, deque()
            for heard in queued:
                self._receive(*heard)

    def _on_move(self, sender: int, move: Move, payload: memoryview | None) -> None:
        key = self._key(move)
        tree = self._trees.decode(bytes(payload or b""))
        if key in self._awaited and isinstance(tree, dict):
            self._take_over(key, tree)
        self._tell(sender, Moved, key=key)

    def _on_moved(self, sender: int, moved: Moved, payload: memoryview | None) -> None:
        """Once all tuples of a server have come there, they need not be kept here."""
        server = self.layout.server_of[self._key(moved)]
        self._came.add(self._key(moved))
        if self._came.issuperset(self.layout.keys(server)):
            self._moving = {key: tree for key, tree in self._moving.items() if self.layout.server_of[key] != server}

    def _load(self, tree: dict[str, Any]) -> None:
        """What is hosted here is newer than what a peer hands over."""
        hosted = {key: self.server.tree(key)["state"] for key in self.server.books}
        super()._load(tree)
        for key, values in hosted.items():
            self.server.write(key, values)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _keep(self, key: int, book: Book, *, always: bool = False) -> None:
        """Checkpoints a tuple when it is time: here, and with the neighbour that would take over."""
        if self._plan is None:
            return
        if not always and not self.server.handlers.checkpoint_now(Held(self.server, key, book), self._log_every):
            return
        mark, record = (self._plan.line, book.version), self._trees.encode(self.server.tree(key, book))

        def act() -> None:
            self._log.append(key, mark, record)
            self._send_copy(key, mark, record)

        self.command(act)

    def _send_copy(self, key: int, mark: Line, record: bytes) -> None:
        neighbour = keeper(self._identity.worker, self._rounds.members)
        if neighbour != self._identity.worker:
            self._tell(neighbour, Copy, memoryview(record), key=key, mark=mark)

    def _copy_checkpoints(self) -> None:
        """A neighbour that is new gets the last complete checkpoint of what is hosted here."""
        kept = self._log.kept()
        for server in self._hosted():
            if marks := kept.get(server):
                for key, record in self._log.raw(server, marks[-1]).items():
                    self._send_copy(key, marks[-1], record)

    def _on_copy(self, sender: int, copy: Copy, payload: memoryview | None) -> None:
        self._log.append(self._key(copy), copy.mark, bytes(payload or b""))

    # -- updates ----------------------------------------------------------------------------------------------------

    def _on_update(self, sender: int, sent: messages.Update, payload: memoryview | None) -> None:
        key, weight = self._key(sent), sent.weight
        if not 0.0 <= weight < 1e30 or key not in self.server.books or (payload is None) != (weight == 0.0):
            raise ValueError(f"update of {key}")
        values = torch.zeros(0) if payload is None else as_values(payload, self.layout.fragments[key].size)
        if not is_finite(values):
            self.tell_not_finite(sender, f"table:{sent.number}", "contribution", count_not_finite(values))
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
        running.add_done_callback(lambda done: self.command(lambda: self._ended(done)))

    def _ended(self, done: Future[list[Reply]]) -> None:
        self._running.discard(done)
        self._answer(done.result())

    def _answer(self, replies: list[Reply]) -> None:
        for reply in replies:
            if reply.worker == self._identity.worker:
                self._landed(reply)
                continue
            self._tell(
                reply.worker,
                messages.Reply,
                None if reply.values is None else reply.values.numpy().data,
                key=reply.key,
                number=reply.number,
                version=reply.version,
                to=reply.attempt,
                empty=reply.values is None,
            )

    def _on_done(self, sender: int, idle: Idle, payload: memoryview | None) -> None:
        (self._done.add if idle.done else self._done.discard)(sender)
        self._count()

    def _count(self) -> None:
        """Tells the servers here whose contributions to wait for."""
        groups: dict[int, set[int]] = {}
        for worker in self._rounds.members:
            if worker not in self._done:
                groups.setdefault(self._group_of(worker), set()).add(worker)
        self._answer(self.server.wants(groups))

    def _on_get(self, sender: int, get: Get, payload: memoryview | None) -> None:
        key = self._key(get)
        tree = {"state": self.server.tree(key)["state"]}
        self._tell(sender, Value, memoryview(self._trees.encode(tree)), key=key)

    # -- messages ---------------------------------------------------------------------------------------------------

    def host(self, key: int) -> int:
        """The worker that hosts a tuple."""
        assert self._plan is not None
        return self._plan.host[self.layout.server_of[key]]

    def _send(self, peer: int, body: Body, payload: memoryview | None) -> None:
        """Sends a message, to this worker itself without a wire."""
        if peer == self._identity.worker:
            self._receive(peer, body, payload)
        else:
            super()._send(peer, body, payload)

    def _receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        fenced = self._rounds.attempts.get(sender) != body.attempt
        if isinstance(body, messages.Reply):  # of whatever generation: the number says what it is the reply to
            if body.to == self._identity.attempt and not fenced:
                self._take_reply(body, payload)
            return
        if body.generation > self._rounds.generation:
            if len(self._early) >= MOST_QUEUED:
                raise ValueError("too many messages of a generation not heard of")
            self._early.append(Heard(sender, body, payload))
            return
        if body.generation < self._rounds.generation or self._frozen or fenced:
            return
        if isinstance(body, WAITS) and self._awaited:
            if len(self._queue) >= MOST_QUEUED and sender != self._identity.worker:
                raise ValueError("too many messages for tuples that have yet to come")
            self._queue.append(Heard(sender, body, payload))
            return
        try:
            getattr(self, "_on_" + body.tag)(sender, body, payload)
        except DivergedError as error:  # of what was merged here: no message is to blame
            self.signals.put(Broken(error))

    def _take_reply(self, reply: messages.Reply, payload: memoryview | None) -> None:
        key, own = self._key(reply), self._identity
        values = None if reply.empty else as_values(payload, self.layout.fragments[key].size)
        self._landed(Reply(own.worker, own.attempt, key, reply.number, reply.version, values))

    def _key(self, body: Any) -> int:
        """The tuple that a message is about."""
        key = int(body.key)
        if key >= len(self.layout.fragments):
            raise ValueError(f"there is no tuple {key}")
        return key


def as_values(payload: memoryview | None, size: int) -> Tensor:
    """A payload as float32 values; it must be exactly so many."""
    if payload is None or payload.nbytes != 4 * size:
        raise ValueError(f"{0 if payload is None else payload.nbytes} bytes where {4 * size} belong")
    return torch.frombuffer(payload, dtype=torch.float32)
