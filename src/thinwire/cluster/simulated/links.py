"""Links of a simulated cluster: links within one process, whose messages take the time of the simulated network."""

from __future__ import annotations

import functools
import json
import math

from thinwire.cluster.simulated.fault_injection import FaultInjection
from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.network import Network
from thinwire.protocol.messages import COORDINATOR, Message
from thinwire.transport.memory import MemoryHub, MemoryLink, Room
from thinwire.transport.ports import Traffic

FRAME_BYTES = 64
"""Bytes of a message on the network beside its header and payload."""


class SimulatedWire(Room):
    """The links of one run; see `thinwire.transport.ports.Wire`."""

    def __init__(
        self,
        time: VirtualTime,
        network: Network,
        driver: int,
        handling: float = math.inf,
        message_faults: FaultInjection | None = None,
    ) -> None:
        super().__init__(make=time.queue)
        self.time, self._network, self._driver = time, network, driver
        self.handling = handling
        """Bytes a second that a worker's processor can pack, encrypt, add up and unpack."""
        self.message_faults = FaultInjection(0) if message_faults is None else message_faults
        self.dead: list[tuple[int, int]] = []
        """Workers and attempts whose connections have ended without a report to the coordinator."""
        self._gone: set[str] = set()

    def put(self, address: str, message: Message) -> None:
        """Sends a message. Headers go through JSON and payloads are copied, as on a real wire."""
        header = json.dumps(message.header)
        payload = None if message.payload is None else memoryview(bytearray(message.payload))
        size = len(header) + FRAME_BYTES + (0 if payload is None else payload.nbytes)
        arrived = Message(message.sender, json.loads(header), payload)
        source, target = self._node(message.sender), self._node(_worker(address))
        for late in self.message_faults.delays(source, target, self.time.now()):
            self._network.send(source, target, size, functools.partial(self._come, address, arrived, late))

    def _come(self, address: str, message: Message, late: float) -> None:
        if late:
            self.time.at(self.time.now() + late, lambda: self._deliver(address, message))
        else:
            self._deliver(address, message)

    def traffic(self, worker: int) -> Traffic:
        """Bytes that have left a worker's node."""
        sent_bytes, busy_s = self._network.sent(self._node(worker))
        return Traffic(sent_bytes, busy_s, self._network.round_trip_s)

    def kill(self, worker: int, attempt: int) -> None:
        """Ends all connections of an attempt: messages to it are dropped, and the coordinator is told."""
        address = f"memory:{worker}.{attempt}"
        self._gone.add(address)
        self.inboxes.pop(address, None)
        if self._node(worker) != self._driver:
            self._network.drop(self._node(worker))
        self.dead.append((worker, attempt))

    def _deliver(self, address: str, message: Message) -> None:
        if address not in self._gone:
            self.inbox(address).put(message)

    def _node(self, worker: int) -> int:
        return self._driver if worker == COORDINATOR else min(worker, self._driver)

    def link(self, worker: int, attempt: int) -> MemoryLink:
        return _Link(self, me=worker, attempt=attempt)

    def silent(self, address: str) -> bool:
        """Whether a worker has been killed; its last messages are dropped."""
        return address in self._gone


class _Link(MemoryLink):
    """A worker's link, with the processor time for the bytes that cross it."""

    _room: SimulatedWire
    _handled = 0

    def send(self, peer: int, header: dict[str, object], payload: memoryview | None = None) -> None:
        self._handled += 0 if payload is None else payload.nbytes
        if header["t"] == "join":  # a fixed machine name, because a longer one would take longer on the network
            header = {**header, "host": f"machine-{self._me}", "pid": 0}
        if not self._room.silent(self.address):
            super().send(peer, header, payload)

    def traffic(self) -> Traffic | None:
        return self._room.traffic(self._me)

    def receive(self, timeout_s: float) -> list[Message]:
        if self._handled:
            taken, self._handled = self._handled / self._room.handling, 0
            self._room.time.sleep(taken)
        found = super().receive(timeout_s)
        self._handled += sum(m.payload.nbytes for m in found if m.payload is not None)
        return found


class SimulatedHub(MemoryHub):
    """The coordinator's link; see `thinwire.transport.ports.Hub`."""

    _room: SimulatedWire

    def broken(self) -> list[tuple[int, int]]:
        found, self._room.dead = self._room.dead, []
        return found


def _worker(address: str) -> int:
    name = address.partition(":")[2]
    return COORDINATOR if name == "hub" else int(name.partition(".")[0])
