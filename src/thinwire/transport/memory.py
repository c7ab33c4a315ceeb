"""Links inside one process: the same messages through queues. The in-memory twin of `wire`."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping

from thinwire.events import Event
from thinwire.protocol.clock import REAL, Queue
from thinwire.protocol.forms import Header
from thinwire.protocol.messages import COORDINATOR, Message
from thinwire.transport.ports import Traffic


class Room:
    """Where the links of one run find each other; `make` makes an inbox."""

    def __init__(self, make: Callable[[], Queue] = REAL.queue) -> None:
        self.inboxes: dict[str, Queue] = {}
        self._make = make

    def link(self, worker: int, attempt: int) -> MemoryLink:
        """A worker's end."""
        return MemoryLink(self, me=worker, attempt=attempt)

    def inbox(self, address: str) -> Queue:
        if address not in self.inboxes:
            self.inboxes[address] = self._make()
        return self.inboxes[address]

    def put(self, address: str, message: Message) -> None:
        """Headers go through JSON and payloads are copied, as on a real wire."""
        payload = None if message.payload is None else memoryview(bytearray(message.payload))
        header = json.loads(json.dumps(message.header))
        self.inbox(address).put(Message(message.sender, header, payload))


def _drain(inbox: Queue, timeout_s: float) -> list[Message]:
    found: list[Message] = []
    try:
        first = inbox.get(timeout=timeout_s) if timeout_s > 0 else inbox.get_nowait()
        if first is not None:
            found.append(first)
        while len(found) < 1024:
            later = inbox.get_nowait()
            if later is not None:
                found.append(later)
    except queue.Empty:
        pass
    return found


class MemoryLink:
    """A worker's link; see `thinwire.transport.ports.Link`."""

    def __init__(self, room: Room, *, me: int, attempt: int) -> None:
        self._room, self._me = room, me
        self.address = f"memory:{me}.{attempt}"
        self._inbox = room.inbox(self.address)
        self._peers: dict[int, str] = {}
        self.refused = 0

    def connect(self, peers: Mapping[int, str]) -> None:
        self._peers = dict(peers)

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        if peer == COORDINATOR:
            self._room.put("memory:hub", Message(self._me, header, payload))
        elif peer in self._peers:
            self._room.put(self._peers[peer], Message(self._me, header, payload))

    def receive(self, timeout_s: float) -> list[Message]:
        return _drain(self._inbox, timeout_s)

    def traffic(self) -> Traffic | None:
        return Traffic(0, 0.0)

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._room.inboxes.pop(self.address, None)


class MemoryHub:
    """The coordinator's link; see `thinwire.transport.ports.Hub`."""

    address = "memory:hub"

    def __init__(self, room: Room) -> None:
        self._room = room
        self._inbox = room.inbox(self.address)
        self.refused = 0

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        self._room.put(f"memory:{worker}.{attempt}", Message(COORDINATOR, header, payload))

    def receive(self, timeout_s: float) -> list[Message]:
        return _drain(self._inbox, timeout_s)

    def broken(self) -> list[tuple[int, int]]:
        return []

    def notices(self) -> list[Event]:
        return []

    def close(self) -> None:
        self._room.inboxes.pop(self.address, None)
