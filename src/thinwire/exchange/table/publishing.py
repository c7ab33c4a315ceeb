"""Publications of a table at one worker: its pages sent and taken in, and what the main thread hears of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from thinwire.exchange.notes import as_note
from thinwire.exchange.signals import Missed, Noted, Published
from thinwire.exchange.station import Station
from thinwire.exchange.table.host import Host, as_values
from thinwire.exchange.table.pages import Name, Publications, name_of
from thinwire.exchange.table.plan import Layout
from thinwire.protocol import messages
from thinwire.protocol.messages import Go, Have, Mark, Page


class Publishing:
    """What the first worker knows and decides, and what all members take up of it."""

    def __init__(self, station: Station, layout: Layout, host: Host) -> None:
        self._station, self._layout, self._host = station, layout, host
        self._notes: deque[dict[str, Any]] = deque()
        """Notes that wait until a generation has formed."""
        self._unseen: list[Published] = []
        """Publications that came before the joint state."""
        self._behind: dict[str, int] = {}
        """By parameter, in how many updates it took no step, as servers last said."""
        self._gone: Name = (0, 0)
        """The last publication that all were told to take up, as far as this worker has heard."""
        tell, clock = station.tell, station.time.now
        self._pages = Publications(layout, station.joint.size, tell, self._published, clock)
        self.tick = self._pages.tick

    def announce(self, note: dict[str, Any]) -> None:
        """Tells the first worker what this one notes, or publishes where this one is the first."""
        lead = self._station.rounds.members[:1]
        if self._station.standing.frozen:
            self._notes.append(note)
        elif lead != (self._station.worker,):
            self._station.tell(lead[0], messages.Noted, note={"rows": note.get("rows", 0)})
        elif "publish" in note:
            self._pages.ask(note)

    # -- generations ------------------------------------------------------------------------------------------------

    def answer(self) -> dict[str, Any]:
        """What this worker says of publications when a generation is about to form."""
        return {"went": list(max(self._pages.went, self._gone))}

    def begin(self, went: Name) -> None:
        """A generation has begun, some member of which had taken up publications until `went`."""
        self._pages.begin(self._station.rounds.generation, self._station.rounds.members, self._station.worker, went)

    def flush(self) -> None:
        """Announces what was noted while the generation formed."""
        notes, self._notes = self._notes, deque()
        for note in notes:
            self.announce(note)

    def load(self, tree: dict[str, Any]) -> None:
        """A joint state from a peer has these publications behind it."""
        self._pages.went = max(self._pages.went, name_of(tree["went"]))

    def caught(self) -> None:
        """Takes up the publications that came before the joint state, save those that the joint state had seen.

        One of an earlier generation was taken up as this one began, by all who hold the joint state, or is dropped.
        """
        early, self._unseen = self._unseen, []
        missed, self._pages.missed = self._pages.missed, []
        for published in early:
            if published.name > max(self._pages.went, (self._station.rounds.generation, 0)):
                self._pages.went = published.name
                self._station.signals.put(published)
            else:
                missed.append(published.note)
        for note in missed:
            self._station.signals.put(Missed(note))

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_note(self, sender: int, noted: messages.Noted, payload: memoryview | None) -> None:
        self._station.signals.put(Noted(sender, as_note(noted.note)))

    def on_mark(self, sender: int, mark: Mark, payload: memoryview | None) -> None:
        name, note = mark.name, as_note(mark.note)
        if sender != self._station.rounds.members[0]:
            raise ValueError("only the first worker publishes")
        self._pages.marked(name, note)
        for key in sorted(self._host.server.books):
            tree = self._host.server.tree(key)
            state, kept = tree["state"], {"state": tree["state"], "behind": tree["behind"]}
            for member in self._station.rounds.members:
                whole = member == sender and "save" in note
                data = memoryview(self._station.trees.encode(kept)) if whole else state[0].numpy().data
                self._station.tell(member, Page, data, key=key, name=name, whole=whole)

    def on_page(self, sender: int, page: Page, payload: memoryview | None) -> None:
        key = self._layout.key(page.key)
        if page.whole:
            tree = self._station.trees.decode(bytes(payload or b""))
            values = list(tree["state"]) if isinstance(tree, dict) else []
            self._behind.update(dict(tree.get("behind", {})) if isinstance(tree, dict) else {})
        else:
            values = [as_values(payload, self._layout.fragments[key].size)]
        self._pages.page(page.name, key, values, whole=page.whole)

    def on_have(self, sender: int, have: Have, payload: memoryview | None) -> None:
        self._pages.have(sender, have.name)

    def on_go(self, sender: int, go: Go, payload: memoryview | None) -> None:
        if sender == self._station.rounds.members[0]:
            self._gone = max(self._gone, go.name)
            self._pages.go(go.name)

    def _published(self, name: Name, note: dict[str, Any], model: Tensor, tuples: dict[int, list[Any]]) -> None:
        joint, books = None, self._host.server.books
        version = min((book.version for book in books.values()), default=0)
        if tuples:
            joint = self._station.joint.tree() | {"version": version, "behind": dict(self._behind)}
            for index, field in enumerate(joint["state"]):
                if isinstance(field, Tensor):
                    for key, values in tuples.items():
                        self._layout.fragments[key].of(field).copy_(values[index])
                else:
                    joint["state"][index] = tuples[0][index]
        published = Published(name, note, model, joint)
        if self._station.standing.needs_state:
            self._unseen.append(published)
        else:
            self._pages.went = max(self._pages.went, name)
            self._station.signals.put(published)
