"""Looks at the whole joint state: one worker fetches every tuple from its host."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.exchange.signals import Asked, Averaged
from thinwire.exchange.station import Station
from thinwire.exchange.table.host import Host
from thinwire.exchange.table.pages import AGAIN_S
from thinwire.exchange.table.plan import Layout
from thinwire.protocol.messages import Get, Value


@dataclass
class _View:
    """A look at the whole joint state that is under way."""

    key: str | None
    """The name under which the main thread asked; None on behalf of a peer."""
    peer: int
    missing: set[int] = field(default_factory=set)
    asked: float = 0.0


class Views:
    """Looks that are under way; each ends with a signal to the main thread."""

    def __init__(self, station: Station, layout: Layout, host: Host) -> None:
        self._station, self._layout, self._host = station, layout, host
        self._views: list[_View] = []

    def for_main_thread(self, key: str) -> None:
        """The main thread wants the joint model under a name."""
        view = _View(key, -1)
        if self._station.standing.frozen:
            self._views.append(view)
        else:
            self._look(view)

    def for_peer(self, peer: int) -> None:
        """A peer needs the joint state, which the main thread hands over once it is here."""
        self._look(_View(None, peer))

    def _look(self, view: _View) -> None:
        view.missing = set(range(len(self._layout.fragments)))
        self._views.append(view)
        self._ask(view)

    def _ask(self, view: _View) -> None:
        view.asked = self._station.time.now()
        for key in sorted(view.missing):
            self._station.tell(self._host.of(key), Get, key=key)

    def tick(self, now: float) -> None:
        """Asks again where no answer has come for long: a connection that broke may have taken something with it."""
        for view in self._views:
            if now - view.asked > AGAIN_S:
                self._ask(view)

    def begin(self) -> None:
        """A generation has begun: the main thread's looks start again. A peer that still needs the state asks again."""
        views, self._views = self._views, []
        for view in views:
            if view.key is not None:
                self._look(view)

    def on_get(self, sender: int, get: Get, payload: memoryview | None) -> None:
        key = self._layout.key(get.key)
        tree = {"state": self._host.server.tree(key)["state"]}
        self._station.tell(sender, Value, memoryview(self._station.trees.encode(tree)), key=key)

    def on_value(self, sender: int, value: Value, payload: memoryview | None) -> None:
        key, joint, books = self._layout.key(value.key), self._station.joint, self._host.server.books
        if sender != self._station.worker and sender == self._host.of(key):
            tree = self._station.trees.decode(bytes(payload or b""))
            if not isinstance(tree, dict):
                raise ValueError("a value is a tree")
            self._host.server.write(key, list(tree["state"]))
        for view in list(self._views):
            view.missing.discard(key)
            if view.missing:
                continue
            self._views.remove(view)
            joint.version = min((book.version for book in books.values()), default=0)
            if view.key is None:
                self._station.signals.put(Asked(view.peer, self._station.rounds.generation))
            else:
                assert joint.model is not None
                self._station.signals.put(Averaged(view.key, joint.model.clone(), {}))
