"""Training's traffic with a table: each worker sends its contribution to the servers, alone, and hears their replies.

When a generation begins, workers send again what they have no reply to; servers know each worker's updates by number,
so that each counts once. A table has five parts: `Host` (the servers that are here), `Updates` (this worker's own
contributions), `Views` (looks at the whole joint state), `Publishing`, and the `Inbox` of their messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.means import Means
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Tree
from thinwire.exchange.round import Launch
from thinwire.exchange.signals import Broken
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.station import Station
from thinwire.exchange.table.host import Host
from thinwire.exchange.table.pages import name_of
from thinwire.exchange.table.plan import Layout
from thinwire.exchange.table.publishing import Publishing
from thinwire.exchange.table.updates import Updates
from thinwire.exchange.table.views import Views
from thinwire.exchange.training import Kind, Training
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import Commit, Copy, Get, Go, Have, Idle, Mark, Move, Moved, Page, Value
from thinwire.strategies import Served

MOST_QUEUED = 1 << 16
WAITS = (messages.Update, Get, Mark)
"""Messages that a host can only answer when all its tuples are there."""
Handler = Callable[[int, Any, memoryview | None], None]


def on_table(*, workers: int, borders: Sequence[int] | None = None) -> Kind:
    """Training's traffic with a table, of a run with so many replicas; tuples begin and end at the borders."""

    def made(station: Station, means: Means) -> Training:
        part = Table(station, means, workers=workers, borders=borders)
        return Training(launching=part, feeding=part.updates, viewing=part, forming=part, turning=part)

    return made


class Heard(NamedTuple):
    """A message of a worker, this one among them."""

    sender: int
    body: Any
    payload: memoryview | None


class Inbox:
    """Messages of a table on the way to what handles them: those that are too early wait here."""

    def __init__(self, station: Station, host: Host, updates: Updates) -> None:
        self._station, self._host, self._updates = station, host, updates
        self.handlers: dict[type[Body], Handler] = {}
        """What takes in each kind of message."""
        self._queue: deque[Heard] = deque()
        """Messages that wait for tuples."""
        self._early: list[Heard] = []
        """Messages of a generation whose commit has not arrived."""

    def receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        """Has a message handled, or keeps it; those of an older generation are passed over."""
        rounds = self._station.rounds
        fenced = rounds.attempts.get(sender) != body.attempt
        if isinstance(body, messages.Reply):  # of any generation: the number says to what it replies
            if body.to == self._station.identity.attempt and not fenced:
                self._updates.take_reply(body, payload)
            return
        if body.generation > rounds.generation:
            if len(self._early) >= MOST_QUEUED:
                raise ValueError("too many messages of a generation not heard of")
            self._early.append(Heard(sender, body, payload))
            return
        if body.generation < rounds.generation or self._station.standing.frozen or fenced:
            return
        if isinstance(body, WAITS) and self._host.awaited:
            if len(self._queue) >= MOST_QUEUED and sender != self._station.worker:
                raise ValueError("too many messages for tuples that have yet to come")
            self._queue.append(Heard(sender, body, payload))
            return
        try:
            self.handlers[type(body)](sender, body, payload)
        except DivergedError as error:  # of what was merged here: no message is to blame
            self._station.signals.put(Broken(error))

    def drop_queued(self) -> None:
        """A generation begins: what waits for tuples is sent again."""
        self._queue.clear()

    def take_up_queued(self) -> None:
        """All tuples are here: what waited for them is taken in."""
        queued, self._queue = self._queue, deque()
        for heard in queued:
            self.receive(*heard)

    def take_up_early(self) -> None:
        """A generation has begun: what came before its commit is taken in."""
        early, self._early = self._early, []
        for heard in early:
            self.receive(*heard)


class Table:
    """One worker's part in a table: the tuples that it hosts, and its own traffic with all of them."""

    def __init__(self, station: Station, means: Means, *, workers: int, borders: Sequence[int] | None = None) -> None:
        joint, strategy = station.joint, station.joint.strategy
        assert isinstance(strategy, Served)
        self._wire, self._means, self._joint, self._standing = station.send, means, joint, station.standing
        self._station = station = replace(station, send=self._send)
        first = workers if strategy.helpers else 0
        self.layout = Layout(borders or (0, joint.size), strategy.servers_of(workers), strategy.tuple_size, first)
        self._host = host = Host(
            station,
            self.layout,
            workers,
            landed=lambda reply: self.updates.landed(reply),
            complete=lambda: self._inbox.take_up_queued(),
        )
        self.server = host.server
        self.updates = Updates(station, self.layout, host)
        views = self._views = Views(station, self.layout, host)
        publishing = self._publishing = Publishing(station, self.layout, host)
        self._inbox = Inbox(station, host, self.updates)
        self._inbox.handlers = {
            messages.Update: host.on_update,
            Get: views.on_get,
            Move: host.on_move,
            Moved: host.on_moved,
            Copy: host.copies.on_copy,
            Idle: host.on_idle,
            Value: views.on_value,
            Mark: publishing.on_mark,
            Page: publishing.on_page,
            Have: publishing.on_have,
            Go: publishing.on_go,
            messages.Noted: publishing.on_note,
        }
        self.follows_until: float = 0
        self.claim, self.receive = self.updates.claim, self._inbox.receive
        self.open, self.restarts, self.close = host.open, host.restarts, host.close
        self.view, self.asked = views.for_main_thread, views.for_peer
        self.announce, self.caught = publishing.announce, publishing.caught

    def _send(self, peer: int, body: Body, payload: memoryview | None) -> None:
        """Sends a message, to this worker itself without a wire."""
        if peer == self._station.worker:
            self.receive(peer, body, payload)
        else:
            self._wire(peer, body, payload)

    # -- this worker's contributions --------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        return self.updates.next_round

    def launch(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: Note
    ) -> None:
        self.announce(note)
        if round >= self._joint.landed:  # else the joint state has come over it
            assert snapshot is not None
            rates = note.get("rates")
            self.updates.contribute(
                round, fragment, snapshot, weight, tuple(rates) if isinstance(rates, list | tuple) else ()
            )

    def follow(self, until: float, *, in_step: bool = False) -> None:
        self.follows_until = until
        if not self._standing.frozen:
            self._say_how_far()

    def _say_how_far(self) -> None:
        self.announce(self._station.note())
        for host in sorted(set(self._host.plan.host)) if self._host.plan else ():
            self._station.tell(host, Idle, done=self.follows_until > 0)

    # -- turns ------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        self._means.follow()
        self._station.rounds.tick()
        self._land_means()
        self.updates.tick()
        now = self._station.time.now()
        self._publishing.tick(now)
        self._views.tick(now)

    def _land_means(self) -> None:
        for done in self._station.rounds.summed():
            self._means.land(done)

    def waiting_for(self) -> dict[str, list[int]]:
        plan, awaited = self._host.plan, self._host.awaited
        waits = self._station.rounds.waiting_for() | self.updates.waiting_for()
        if awaited and plan is not None:
            waits["tuples"] = sorted({plan.source[self.layout.server_of[key]] for key in awaited})
        return waits

    # -- generations ------------------------------------------------------------------------------------------------

    def prepare(self) -> Tree:
        if not self._standing.frozen:
            self._land_means()
            self._standing.frozen = True  # so that nothing new is begun
            self._host.settle()
        self.updates.catch_up()  # a checkpoint may have been loaded since this was made
        return self._host.answer() | self._publishing.answer()

    def holds(self, commit: Commit) -> bool:
        if self._standing.fresh or self._standing.needs_state:
            return commit.since == 0 and commit.digest == self._standing.digest
        return True

    def go_on(self, commit: Commit, held: list[Launch]) -> None:
        for launch in held:
            self._station.rounds.launch(launch)
        self._inbox.drop_queued()
        self._host.bring()
        self._publishing.begin(max(name_of(answer["went"]) for answer in commit.tables.values()))
        self._inbox.take_up_early()
        self.updates.send_again()
        self._views.begin()
        self._say_how_far()
        self._publishing.flush()
        if not self._standing.needs_state:
            self.caught()

    def load(self, tree: Tree) -> None:
        """Takes a joint state over, save the tuples that are hosted here: those are newer.

        A worker's own numbers never go back: servers know its updates by them. What was under way is over.
        """
        self._publishing.load(tree)
        self._host.settle()
        joint = tree["joint"]
        assert isinstance(joint, dict)
        joint["landed"] = max(int(joint["landed"]), self.next_round)
        self.updates.drop()
        hosted = {key: self.server.tree(key)["state"] for key in self.server.books}
        self._joint.load(joint)
        for key, values in hosted.items():
            self.server.write(key, values)
        self.updates.catch_up()
