"""Training's traffic with a table: each worker sends its contribution to the servers, alone, and hears their replies.

When a generation begins, workers send again what they have no reply to; servers know each worker's updates by number,
so that each counts once.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.identity import Identity
from thinwire.exchange.joint import JointState
from thinwire.exchange.notes import is_note
from thinwire.exchange.rounds import Launch
from thinwire.exchange.signals import Asked, Averaged, Landed, LeftOut, Missed, Noted, Published
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.table.host import Host, as_values
from thinwire.exchange.table.pages import AGAIN_S, Name, Publications, name_of
from thinwire.exchange.table.server import Reply
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.protocol.messages import Commit, Get, Go, Have, Idle, Mark, Page, Value
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.strategies import Served
from thinwire.transport.ports import Link

FLOAT_BYTES = 4


@dataclass
class _Flight:
    """A contribution of this worker's that is under way."""

    fragment: Fragment
    values: Tensor
    weight: float
    reply: Tensor
    missing: set[int]
    held: set[int]
    """Tuples whose values have yet to be made."""
    rates: tuple[float, ...] = ()
    absent: frozenset[int] = frozenset()
    """Parameters, by number, without a gradient."""
    started: float = 0.0
    line: int | None = None
    """Of updates, in which servers know it by its number; None until it was sent."""
    withheld: bool = False
    """What has yet to be sent counts for nothing."""
    over: bool = False
    """It may be in what servers began anew with: they are to answer it, and not to merge it."""
    size_bytes: int = 0


@dataclass
class _View:
    """A look at the whole joint state that is under way."""

    key: str | None
    """The name under which the main thread asked; None on behalf of a peer."""
    peer: int
    missing: set[int] = field(default_factory=set)
    asked: float = 0.0


class Table(Host):
    """One worker's part in a table: the tuples it hosts, and its own traffic with all of them."""

    def __init__(self, link: Link, seat: Identity, joint: JointState, **settings: Any) -> None:
        super().__init__(link, seat, joint, **settings)
        self._numbering = threading.Lock()
        self._next_round = joint.landed
        self._flights: dict[int, _Flight] = {}
        self._own: deque[tuple[int, int]] = deque()
        """Rounds and tuples of this worker's for servers here: one at a time, between what comes from others."""
        self._views: list[_View] = []
        self._notes: deque[dict[str, Any]] = deque()
        self._unseen: list[Published] = []
        self._behind: dict[str, int] = {}
        """By parameter, in how many updates it took no step, as servers last said."""
        self._gone: Name = (0, 0)
        """The last publication that all were told to take up, as far as this worker has heard."""
        self._pages = Publications(self.layout, joint.size, self._tell, self._published, self.time.now)
        self.tuples = self.layout.fragments

    # -- for any thread ---------------------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        with self._numbering:
            return self._next_round

    def claim(self) -> tuple[int, Fragment]:
        with self._numbering:
            round = self._next_round
            self._next_round += 1
        return round, Fragment(0, self._joint.size)

    def join(self) -> None:
        with self._numbering:  # a checkpoint may have been loaded since this was made
            self._next_round = max(self._next_round, self._joint.landed)
        super().join()

    # -- updates ----------------------------------------------------------------------------------------------------

    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        self.announce(note)
        if round < self._joint.landed:  # the joint state has come over it
            return
        taken = snapshot.take() if isinstance(snapshot, Snapshot) else snapshot
        assert taken is not None
        values = self._joint.strategy.contribute(self._joint.state, taken)
        keys = set(range(len(self.layout.fragments)))
        held = set(keys) if self._joint.strategy.subject == "gradients" else set()
        reply = torch.empty_like(values)
        flight = _Flight(
            fragment, values, weight, reply, keys, held, tuple(note.get("rates") or ()), started=self.time.now()
        )
        self._flights[round] = flight
        if not held and not is_finite(values):
            self._leave_out(round, flight, values)
        self._send_off(round, keys)

    def _leave_out(self, round: int, flight: _Flight, values: Tensor) -> None:
        flight.withheld = True
        self.signals.put(LeftOut(round, count_not_finite(values), False))

    def withhold(self, round: int) -> None:
        if round in self._flights:
            self._flights[round].withheld = True

    def feed(self, round: int, keys: list[int], absent: frozenset[int]) -> None:
        if round in self._flights:
            self._flights[round].absent = absent
            self._flights[round].held.difference_update(keys)
            self._send_off(round, set(keys))

    def abandon(self, round: int) -> None:
        if self._flights.pop(round, None) is not None:
            self._land_answered()  # later rounds that only waited for this one

    def _send_off(self, round: int, keys: set[int]) -> None:
        """Sends what has no reply yet, beginning with another host than the other workers do."""
        if self._frozen:
            return  # when the generation has formed
        flight, count = self._flights[round], len(self.layout.fragments)
        flight.line = self._plan.line if self._plan else None
        first = self._identity.worker * count // max(1, self.layout.servers)
        for key in sorted(keys & flight.missing - flight.held, key=lambda k: (k - first) % count):
            if self.host(key) == self._identity.worker:
                self._own.append((round, key))
            else:
                flight.size_bytes += FLOAT_BYTES * self.layout.fragments[key].size
                self._update(round, key)
        if self._own:
            self._link.wake()

    def _update(self, round: int, key: int) -> None:
        flight = self._flights[round]
        values: Tensor | None = self.layout.fragments[key].of(flight.values)
        assert values is not None
        left_out = flight.withheld
        if not left_out and self._joint.strategy.subject == "gradients" and not is_finite(values):
            left_out = True
            self.signals.put(LeftOut(round, count_not_finite(values), False))
        weight, values = (0.0, None) if left_out else (flight.weight, values)
        assert isinstance(self._joint.strategy, Served)
        absent = flight.absent.intersection(self._joint.strategy.parameters_in(self.layout.fragments[key]))
        self._tell(
            self.host(key),
            messages.Update,
            None if values is None else values.numpy().data,
            key=key,
            number=round,
            weight=weight,
            rates=flight.rates,
            absent=tuple(sorted(absent)),
            over=flight.over,
        )

    def _landed(self, reply: Reply) -> None:
        flight = self._flights.get(reply.number)
        if flight is None or reply.key not in flight.missing:
            return
        target = self.layout.fragments[reply.key].of(flight.reply)
        if reply.values is None:  # it was merged, and what came of it is lost
            target.zero_()
        else:
            target.copy_(reply.values)
        flight.missing.discard(reply.key)
        self._land_answered()

    def _land_answered(self) -> None:
        while self._flights and not self._flights[min(self._flights)].missing:
            round = min(self._flights)
            done = self._flights.pop(round)
            with self._joint.lock:
                self._joint.landed = max(self._joint.landed, round + 1)
            taken, own = self.time.now() - done.started, {self._identity.worker: self._note()}
            self.signals.put(Landed(round, done.fragment, done.reply, None, own, None, None, taken, done.size_bytes))

    def _waiting_for(self) -> dict[str, list[int]]:
        waits = super()._waiting_for()
        for round, flight in self._flights.items():
            waits[f"table:{round}"] = sorted({self.host(key) for key in flight.missing}) if self._plan else []
        if self._awaited and self._plan is not None:
            waits["tuples"] = sorted({self._plan.source[self.layout.server_of[key]] for key in self._awaited})
        return waits

    def _work(self) -> None:
        super()._work()
        if self._own:
            round, key = self._own.popleft()
            if round in self._flights and key in self._flights[round].missing:
                self._update(round, key)
            self._link.wake()
        now = self.time.now()
        self._pages.tick(now)
        for view in self._views:
            if now - view.asked > AGAIN_S:  # a connection that broke may have taken something with it
                self._ask(view)

    # -- what the first worker knows and decides --------------------------------------------------------------------

    def announce(self, note: dict[str, Any]) -> None:
        if self._frozen:
            self._notes.append(note)
        elif self._rounds.members[0] != self._identity.worker:
            self._tell(self._rounds.members[0], messages.Noted, note={"rows": note.get("rows", 0)})
        elif "publish" in note:
            self._pages.ask(note)

    def follow(self, until: float, *, in_step: bool = False) -> None:
        super().follow(until, in_step=in_step)
        if not self._frozen:
            self._say_how_far()

    def _say_how_far(self) -> None:
        self.announce(self._note())
        for host in sorted(set(self._plan.host)) if self._plan else ():
            self._tell(host, Idle, done=self.follows_until > 0)

    def _on_note(self, sender: int, noted: messages.Noted, payload: memoryview | None) -> None:
        if not is_note(noted.note):
            raise ValueError("a note is a table of what workers say with rounds")
        self.signals.put(Noted(sender, dict(noted.note)))

    # -- generations ------------------------------------------------------------------------------------------------

    def _holds(self, commit: Commit) -> bool:
        if self._fresh or self._needs_state:
            return commit.since == 0 and commit.digest == self.digest
        return True

    def _answer_of_table(self) -> dict[str, Any]:
        return super()._answer_of_table() | {"went": list(max(self._pages.went, self._gone))}

    def _go_on(self, commit: Commit, given_up: list[Launch]) -> None:
        held, self._held = self._held, deque()
        for launch in [*given_up, *held]:
            self._start_round(launch)
        went = max(name_of(answer["went"]) for answer in commit.tables.values())
        self._bring()
        self._pages.begin(self._rounds.generation, self._rounds.members, self._identity.worker, went)
        early, self._early = self._early, []
        for heard in early:
            self._receive(*heard)
        for round, flight in sorted(self._flights.items()):
            if self._undone():
                flight.missing = set(range(len(self.layout.fragments)))
            other = flight.line not in (None, self._plan.line if self._plan else None)
            if self._needs_state and other:
                self._flights.pop(round)  # the joint state comes over it
                continue
            flight.over |= other and self._began_anew()
            self._send_off(round, flight.missing)
        views, self._views = self._views, []
        for view in views:
            if view.key is not None:  # a peer that still needs the joint state asks again
                self._look(view)
        self._say_how_far()
        notes, self._notes = self._notes, deque()
        for note in notes:
            self.announce(note)
        if not self._needs_state:
            self._caught()

    def _undone(self) -> bool:
        """Whether what servers had merged of this worker's may be undone, also where it has their reply.

        They went back to a checkpoint, and know what is in it. Where the reference put in what it had nobody knows, and
        only who would wait for a contribution for ever, under strict consistency, is given it again.
        """
        return self._kind == "back" or (self._kind == "put" and self._strict)

    def _began_anew(self) -> bool:
        """Whether nobody knows what is in the servers' values: rather than count twice, a contribution is lost."""
        return self._kind == "put" and not self._strict

    @property
    def _kind(self) -> str:
        return "live" if self._plan is None else self._plan.kind

    @property
    def _strict(self) -> bool:
        return isinstance(self._joint.strategy, Served) and self._joint.strategy.strict

    def _load(self, tree: dict[str, Any]) -> None:
        """A worker's own numbers never go back: servers know its updates by them. What was under way is over."""
        self._pages.went = max(self._pages.went, name_of(tree["went"]))
        self._settle()
        tree["joint"]["landed"] = max(int(tree["joint"]["landed"]), self.next_round)
        self._flights = {}
        super()._load(tree)

    def _loaded(self) -> None:
        with self._numbering:
            self._next_round = max(self._next_round, self._joint.landed)

    def _caught(self) -> None:
        """Publications that came before the joint state are taken up after it, save those that it had seen.

        One of an earlier generation was taken up as this one began, by all who hold the joint state, or is nobody's.
        """
        early, self._unseen = self._unseen, []
        missed, self._pages.missed = self._pages.missed, []
        for published in early:
            if published.name > max(self._pages.went, (self._rounds.generation, 0)):
                self._pages.went = published.name
                self.signals.put(published)
            else:
                missed.append(published.note)
        for note in missed:
            self.signals.put(Missed(note))

    # -- the whole joint state --------------------------------------------------------------------------------------

    def view(self, key: str) -> None:
        view = _View(key, -1)
        if self._frozen:
            self._views.append(view)
        else:
            self._look(view)

    def _asked(self, peer: int) -> None:
        self._look(_View(None, peer))

    def _look(self, view: _View) -> None:
        view.missing = set(range(len(self.layout.fragments)))
        self._views.append(view)
        self._ask(view)

    def _ask(self, view: _View) -> None:
        view.asked = self.time.now()
        for key in sorted(view.missing):
            self._tell(self.host(key), Get, key=key)

    def _on_value(self, sender: int, value: Value, payload: memoryview | None) -> None:
        key = self._key(value)
        if sender != self._identity.worker and sender == self.host(key):
            tree = self._trees.decode(bytes(payload or b""))
            if not isinstance(tree, dict):
                raise ValueError("a value is a tree")
            self.server.write(key, list(tree["state"]))
        for view in list(self._views):
            view.missing.discard(key)
            if view.missing:
                continue
            self._views.remove(view)
            self._joint.version = min((book.version for book in self.server.books.values()), default=0)
            if view.key is None:
                self.signals.put(Asked(view.peer, self._rounds.generation))
            else:
                assert self._joint.model is not None
                self.signals.put(Averaged(view.key, self._joint.model.clone(), {}))

    # -- publications -----------------------------------------------------------------------------------------------

    def _on_mark(self, sender: int, mark: Mark, payload: memoryview | None) -> None:
        name, note = mark.name, mark.note
        if not is_note(note):
            raise ValueError("a note is a table of what workers say with rounds")
        if sender != self._rounds.members[0]:
            raise ValueError("only the first worker publishes")
        self._pages.marked(name, note)
        for key in sorted(self.server.books):
            tree = self.server.tree(key)
            state, kept = tree["state"], {"state": tree["state"], "behind": tree["behind"]}
            for member in self._rounds.members:
                whole = member == sender and "save" in note
                data = memoryview(self._trees.encode(kept)) if whole else state[0].numpy().data
                self._tell(member, Page, data, key=key, name=name, whole=whole)

    def _on_page(self, sender: int, page: Page, payload: memoryview | None) -> None:
        key = self._key(page)
        if page.whole:
            tree = self._trees.decode(bytes(payload or b""))
            values = list(tree["state"]) if isinstance(tree, dict) else []
            self._behind.update(dict(tree.get("behind", {})) if isinstance(tree, dict) else {})
        else:
            values = [as_values(payload, self.layout.fragments[key].size)]
        self._pages.page(page.name, key, values, whole=page.whole)

    def _on_have(self, sender: int, have: Have, payload: memoryview | None) -> None:
        self._pages.have(sender, have.name)

    def _on_go(self, sender: int, go: Go, payload: memoryview | None) -> None:
        if sender == self._rounds.members[0]:
            self._gone = max(self._gone, go.name)
            self._pages.go(go.name)

    def _published(self, name: Name, note: dict[str, Any], model: Tensor, tuples: dict[int, list[Any]]) -> None:
        joint, version = None, min((book.version for book in self.server.books.values()), default=0)
        if tuples:
            joint = self._joint.tree() | {"version": version, "behind": dict(self._behind)}
            for index, field_ in enumerate(joint["state"]):
                if isinstance(field_, Tensor):
                    for key, values in tuples.items():
                        self.layout.fragments[key].of(field_).copy_(values[index])
                else:
                    joint["state"][index] = tuples[0][index]
        published = Published(name, note, model, joint)
        if self._needs_state:
            self._unseen.append(published)
        else:
            self._pages.went = max(self._pages.went, name)
            self.signals.put(published)
