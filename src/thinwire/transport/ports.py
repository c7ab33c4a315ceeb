"""The ports through which messages travel; `thinwire.transport.memory` has their in-memory twins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from thinwire.events import Event
from thinwire.protocol.forms import Header
from thinwire.protocol.messages import Message


class Traffic(NamedTuple):
    """What a worker's sockets have counted, of connections to workers on other machines."""

    sent_bytes: int
    """That have arrived there."""
    busy_s: float
    """Seconds in which some were on their way, and the receiver had room for them."""
    round_trip_s: float = 0.0
    """The shortest there was."""
    answer_s: float = 0.0
    """How long `busy_s` goes on after a burst has been sent, for its answer."""
    tick_s: float = 0.0
    """In steps of what `busy_s` is counted."""


class Link(Protocol):
    """Carries messages between one worker and its peers, the coordinator among them."""

    address: str
    """Where peers reach this worker."""

    def connect(self, peers: Mapping[int, str]) -> None:
        """Makes exactly these workers, by number and address, the ones that can be sent to."""

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        """Queues a message; never blocks. The payload must not change afterwards."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Messages that have come, after waiting at most so long for the first; returns early when woken."""

    def traffic(self) -> Traffic | None:
        """What has crossed it so far, for any thread; nothing where no wire is crossed, None where nobody counts."""

    def wake(self) -> None:
        """Makes a `receive` on another thread return now."""

    def close(self) -> None:
        """Sends what is queued, within a deadline, and lets go of the network."""


class Hub(Protocol):
    """The coordinator's end: carries messages to and from workers by number and attempt."""

    address: str

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None: ...

    def receive(self, timeout_s: float) -> list[Message]: ...

    def broken(self) -> list[tuple[int, int]]:
        """Workers and attempts whose connections have ended since the last call."""

    def notices(self) -> list[Event]:
        """What there is to tell of the wire itself since the last call, for the run's log."""

    def close(self) -> None: ...


class Wire(Protocol):
    """What a worker needs to make its link."""

    def link(self, worker: int, attempt: int) -> Link: ...
