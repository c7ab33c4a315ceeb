"""Messages between coordinator and workers that come once, in order, as long as both live, whatever connections do.

A connection that breaks takes with it what was under way, and nobody is told. So each side numbers what it says, and
keeps it until the other has heard it. Every message has a mark beside::

    {"t": …, "q": 7, "m": [12, 9, 5]}    my 7th word, kept until it is heard; my 12th message; the newest of yours that
                                         has come is the 9th; I have heard your words up to the 5th

What was said before a message that the other has seen, and was not heard, is lost, since a connection keeps its order:
it is said again. No clock is needed. Heartbeats and their answers have no number: one that comes after a later one is
dropped. Rows on their way to a worker are asked for piece by piece and need none of this, nor do messages between
workers: what a round lacks is sent again by another generation (`thinwire.coordinator.membership`).
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thinwire.errors import ProtocolError
from thinwire.events import Event
from thinwire.protocol.clock import Time
from thinwire.protocol.forms import Header, is_count, list_of
from thinwire.protocol.messages import COORDINATOR, Beat, Fetch, Message, Piece, Pong
from thinwire.transport.ports import Hub, Link, Traffic, Wire

MARK = "mark"
"""A mark that says nothing else, for nobody but the channel."""
MARKS = (Beat.tag, Pong.tag, MARK)
ASKED_FOR = (Fetch.tag, Piece.tag)
MOST_EARLY = 4096
"""Messages kept that came before one that was lost."""
FAREWELL_S = 2.0
"""How long a worker that ends waits to be heard."""
TURN_S = 0.1


class _Said(NamedTuple):
    number: int
    mark: int
    header: Header
    payload: memoryview | None


@dataclass
class Channel:
    """One side of what a coordinator and one attempt of a worker say to each other."""

    said: int = 0
    kept: deque[_Said] = field(default_factory=deque)
    heard: int = 0
    _early: dict[int, Message] = field(default_factory=dict)
    _mark: int = 0
    _seen: int = 0

    def number(self, header: Header, payload: memoryview | None) -> Header:
        """A message's header with its number and mark; it is kept until it is heard."""
        self.said += 1
        header = self.mark(header | {"q": self.said})
        self.kept.append(_Said(self.said, self._mark, header, payload))
        return header

    def mark(self, header: Header) -> Header:
        """A header with its mark."""
        self._mark += 1
        return header | {"m": [self._mark, self._seen, self.heard]}

    def take(self, message: Message) -> tuple[list[Message], list[_Said]]:
        """What a message that came lets be heard now, and what is to be said again."""
        if "m" not in message.header:
            return [message], []
        theirs, seen, heard = self._checked(message.header)
        late, self._seen = theirs <= self._seen, max(theirs, self._seen)
        again = self._lost(seen, heard)
        plain = message._replace(header={k: v for k, v in message.header.items() if k not in ("m", "q")})
        if "q" not in message.header:
            return [] if late else [plain], again
        number = message.header["q"]
        if number > self.heard and len(self._early) < MOST_EARLY:
            self._early[number] = plain
        found = []
        while self.heard + 1 in self._early:
            self.heard += 1
            found.append(self._early.pop(self.heard))
        return found, again

    def _checked(self, header: Header) -> tuple[int, int, int]:
        """The numbers of a mark, if they can be: nobody has seen or heard what was not said."""
        if not are_marks(header["m"]) or not is_count(header.get("q", 1)):
            raise ProtocolError(f"{reprlib.repr(header)} has no mark of three whole numbers")
        theirs, seen, heard = header["m"]
        if seen > self._mark or heard > self.said:
            raise ProtocolError(f"a message that answers mark {seen} and word {heard}; {self.said} words were said")
        return theirs, seen, heard

    def _lost(self, seen: int, heard: int) -> list[_Said]:
        while self.kept and self.kept[0].number <= heard:
            self.kept.popleft()
        lost: list[_Said] = []
        for index, said in enumerate(self.kept):
            if said.mark < seen:
                header = self.mark(said.header)
                self.kept[index] = said._replace(mark=self._mark, header=header)
                lost.append(self.kept[index])
        return lost


@dataclass(frozen=True)
class ReliableWire:
    """A wire whose links are sure of the coordinator; see `thinwire.transport.ports.Wire`."""

    wire: Wire
    time: Time

    def link(self, worker: int, attempt: int) -> ReliableLink:
        return ReliableLink(self.wire.link(worker, attempt), attempt, self.time)


class ReliableLink:
    """A worker's link; see `thinwire.transport.ports.Link`. What is for other workers passes as it is."""

    def __init__(self, link: Link, attempt: int, time: Time) -> None:
        self._link, self._attempt, self._time = link, attempt, time
        self._channel = Channel()
        self.address = link.address
        self._malformed = 0

    @property
    def refused(self) -> int:
        return self._malformed + int(getattr(self._link, "refused", 0))

    def connect(self, peers: Mapping[int, str]) -> None:
        self._link.connect(peers)

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        if peer == COORDINATOR:
            header = _stamped(self._channel, header, payload)
        self._link.send(peer, header, payload)

    def receive(self, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        for message in self._link.receive(timeout_s):
            if message.sender != COORDINATOR:
                found.append(message)
                continue
            try:
                heard, again = self._channel.take(message)
            except ProtocolError:
                self._malformed += 1
                continue
            found += [one for one in heard if one.header["t"] != MARK]
            for said in again:
                self._link.send(COORDINATOR, said.header, said.payload)
        return found

    def traffic(self) -> Traffic | None:
        return self._link.traffic()

    def wake(self) -> None:
        self._link.wake()

    def close(self) -> None:
        """Waits until all that was said is heard, within a deadline."""
        until, marked = self._time.now() + FAREWELL_S, -TURN_S
        while self._channel.kept and (now := self._time.now()) < until:
            if now - marked >= TURN_S:
                marked = now
                self._link.send(COORDINATOR, self._channel.mark({"t": MARK, "a": self._attempt}))
            self.receive(TURN_S)
        self._link.close()


class ReliableHub:
    """The coordinator's link; see `thinwire.transport.ports.Hub`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._channels: dict[tuple[int, int], Channel] = {}
        self.address = hub.address
        self._malformed = 0

    @property
    def refused(self) -> int:
        return self._malformed + int(getattr(self._hub, "refused", 0))

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        self._hub.send(worker, attempt, _stamped(self._channel(worker, attempt), header, payload), payload)

    def receive(self, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        for message in self._hub.receive(timeout_s):
            try:
                found += self._take(message)
            except ProtocolError:
                self._malformed += 1
        return found

    def _take(self, message: Message) -> list[Message]:
        worker = message.sender
        attempt: Any = message.header.get("a")
        if not is_count(attempt):
            raise ProtocolError(f"{attempt!r} is no number of an attempt")
        channel = self._channel(worker, attempt)
        heard, again = channel.take(message)
        for said in again:
            self._hub.send(worker, attempt, said.header, said.payload)
        kind = message.header["t"]
        if kind == MARK or (
            kind == Beat.tag and not channel.heard
        ):  # its first words are lost: it is to say them again
            self._hub.send(worker, attempt, channel.mark({"t": MARK}))
            return []
        return heard

    def broken(self) -> list[tuple[int, int]]:
        return self._hub.broken()

    def notices(self) -> list[Event]:
        return self._hub.notices()

    def close(self) -> None:
        """Tells all that they were heard: they wait for it."""
        for (worker, attempt), channel in self._channels.items():
            if channel.heard:
                self._hub.send(worker, attempt, channel.mark({"t": MARK}))
        self._hub.close()

    def _channel(self, worker: int, attempt: int) -> Channel:
        if (worker, attempt) not in self._channels:
            self._channels[worker, attempt] = Channel()
        return self._channels[worker, attempt]


def are_marks(value: Any) -> bool:
    """Whether these are the three numbers of a mark.

    >>> are_marks([12, 9, 5]), are_marks([float("inf"), 0, 0]), are_marks([1, 2])
    (True, False, False)
    """
    return list_of(is_count)(value) and len(value) == 3


def _stamped(channel: Channel, header: Header, payload: memoryview | None) -> Header:
    kind = header["t"]
    if kind in ASKED_FOR:
        return header
    return channel.mark(header) if kind in MARKS and not header.get("sure") else channel.number(header, payload)
