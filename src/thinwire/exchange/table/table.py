"""Training's traffic with a table: each worker sends its contribution to the servers, alone, and hears their replies.

When a generation begins, workers send again what they have no reply to; servers know each worker's updates by number,
so that each counts once. A table has four parts: `Host` (the servers that are here), `Updates` (this worker's own
contributions), `Views` (looks at the whole joint state) and `Publishing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.identity import Identity
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.rounds import Launch
from thinwire.exchange.signals import Broken
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.table.host import Host, as_values
from thinwire.exchange.table.pages import name_of
from thinwire.exchange.table.plan import Layout
from thinwire.exchange.table.publishing import Publishing
from thinwire.exchange.table.server import Reply
from thinwire.exchange.table.updates import Updates
from thinwire.exchange.table.views import Views
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import Commit, Copy, Get, Go, Have, Idle, Mark, Move, Moved, Page, Value
from thinwire.strategies import Served
from thinwire.transport.ports import Link

MOST_QUEUED = 1 << 16
WAITS = (messages.Update, Get, Mark)
"""Messages that a host can only answer when all its tuples are there."""
Handler = Callable[[int, Any, memoryview | None], None]


class Heard(NamedTuple):
    """A message of a worker, this one among them."""

    sender: int
    body: Any
    payload: memoryview | None


class Table(Member):
    """One worker's part in a table: the tuples that it hosts, and its own traffic with all of them."""

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
        self.tuples = self.layout.fragments
        self._host = Host(self.station, self.layout, workers, landed=self._landed, complete=self._take_up_queued)
        self.server = self._host.server
        self._updates = Updates(self.station, self.layout, self._host, self._note)
        self._views = Views(self.station, self.layout, self._host)
        self._publishing = Publishing(self.station, self.layout, self._host)
        self._queue: deque[Heard] = deque()
        """Messages that wait for tuples."""
        self._early: list[Heard] = []
        """Messages of a generation whose commit has not arrived."""
        self._handlers: dict[type[Body], Handler] = {
            messages.Update: self._host.on_update,
            Get: self._views.on_get,
            Move: self._host.on_move,
            Moved: self._host.on_moved,
            Copy: self._host.copies.on_copy,
            Idle: self._host.on_idle,
            Value: self._views.on_value,
            Mark: self._publishing.on_mark,
            Page: self._publishing.on_page,
            Have: self._publishing.on_have,
            Go: self._publishing.on_go,
            messages.Noted: self._publishing.on_note,
        }

    # -- for any thread ---------------------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        return self._updates.next_round

    def claim(self) -> tuple[int, Fragment]:
        return self._updates.claim()

    # -- for the exchange thread ------------------------------------------------------------------------------------

    def join(self) -> None:
        self._updates.catch_up()
        super().join()

    def close(self) -> None:
        self._host.close()

    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        self.announce(note)
        if round >= self._joint.landed:  # else the joint state has come over it
            assert snapshot is not None
            self._updates.contribute(round, fragment, snapshot, weight, tuple(note.get("rates") or ()))

    def withhold(self, round: int) -> None:
        self._updates.withhold(round)

    def feed(self, round: int, keys: list[int], absent: frozenset[int]) -> None:
        self._updates.feed(round, keys, absent)

    def abandon(self, round: int) -> None:
        self._updates.abandon(round)

    def open(self, generation: int, model: Tensor | None) -> None:
        self._host.open(generation, model)

    def view(self, key: str) -> None:
        self._views.for_main_thread(key)

    def announce(self, note: dict[str, Any]) -> None:
        self._publishing.announce(note)

    def follow(self, until: float, *, in_step: bool = False) -> None:
        super().follow(until, in_step=in_step)
        if not self.standing.frozen:
            self._say_how_far()

    def _say_how_far(self) -> None:
        self.announce(self._note())
        for host in sorted(set(self._host.plan.host)) if self._host.plan else ():
            self._tell(host, Idle, done=self.follows_until > 0)

    def _work(self) -> None:
        super()._work()
        self._updates.tick()
        now = self.time.now()
        self._publishing.tick(now)
        self._views.tick(now)

    def _waiting_for(self) -> dict[str, list[int]]:
        waits, plan, awaited = super()._waiting_for() | self._updates.waiting_for(), self._host.plan, self._host.awaited
        if awaited and plan is not None:
            waits["tuples"] = sorted({plan.source[self.layout.server_of[key]] for key in awaited})
        return waits

    # -- generations ------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        self._take_up_completed()
        self.standing.frozen = True  # so that nothing new is begun
        self._host.settle()

    def _answer_of_table(self) -> dict[str, Any]:
        return self._host.answer() | self._publishing.answer()

    def _restarts(self, commit: Commit) -> bool:
        return self._host.restarts(commit)

    def _holds(self, commit: Commit) -> bool:
        if self.standing.fresh or self.standing.needs_state:
            return commit.since == 0 and commit.digest == self.digest
        return True

    def _go_on(self, commit: Commit, given_up: list[Launch]) -> None:
        held, self._held = self._held, deque()
        for launch in [*given_up, *held]:
            self._start_round(launch)
        self._queue.clear()
        self._host.bring()
        self._publishing.begin(max(name_of(answer["went"]) for answer in commit.tables.values()))
        early, self._early = self._early, []
        for heard in early:
            self._receive(*heard)
        self._updates.send_again()
        self._views.begin()
        self._say_how_far()
        self._publishing.flush()
        if not self.standing.needs_state:
            self._caught()

    def _load(self, tree: dict[str, Any]) -> None:
        """Takes a joint state over, save the tuples that are hosted here: those are newer.

        A worker's own numbers never go back: servers know its updates by them. What was under way is over.
        """
        self._publishing.load(tree)
        self._host.settle()
        tree["joint"]["landed"] = max(int(tree["joint"]["landed"]), self.next_round)
        self._updates.drop()
        hosted = {key: self.server.tree(key)["state"] for key in self.server.books}
        super()._load(tree)
        for key, values in hosted.items():
            self.server.write(key, values)

    def _loaded(self) -> None:
        self._updates.catch_up()

    def _caught(self) -> None:
        self._publishing.caught()

    def _asked(self, peer: int) -> None:
        self._views.for_peer(peer)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send(self, peer: int, body: Body, payload: memoryview | None) -> None:
        """Sends a message, to this worker itself without a wire."""
        if peer == self._identity.worker:
            self._receive(peer, body, payload)
        else:
            super()._send(peer, body, payload)

    def _receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        fenced = self._rounds.attempts.get(sender) != body.attempt
        if isinstance(body, messages.Reply):  # of any generation: the number says to what it replies
            if body.to == self._identity.attempt and not fenced:
                self._take_reply(body, payload)
            return
        if body.generation > self._rounds.generation:
            if len(self._early) >= MOST_QUEUED:
                raise ValueError("too many messages of a generation not heard of")
            self._early.append(Heard(sender, body, payload))
            return
        if body.generation < self._rounds.generation or self.standing.frozen or fenced:
            return
        if isinstance(body, WAITS) and self._host.awaited:
            if len(self._queue) >= MOST_QUEUED and sender != self._identity.worker:
                raise ValueError("too many messages for tuples that have yet to come")
            self._queue.append(Heard(sender, body, payload))
            return
        try:
            self._handlers[type(body)](sender, body, payload)
        except DivergedError as error:  # of what was merged here: no message is to blame
            self.signals.put(Broken(error))

    def _take_up_queued(self) -> None:
        """All tuples are here: what waited for them is taken in."""
        queued, self._queue = self._queue, deque()
        for heard in queued:
            self._receive(*heard)

    def _take_reply(self, reply: messages.Reply, payload: memoryview | None) -> None:
        key, own = self.layout.key(reply.key), self._identity
        values = None if reply.empty else as_values(payload, self.layout.fragments[key].size)
        self._landed(Reply(own.worker, own.attempt, key, reply.number, reply.version, values))

    def _landed(self, reply: Reply) -> None:
        self._updates.landed(reply)
