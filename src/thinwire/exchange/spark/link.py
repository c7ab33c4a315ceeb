"""An agent's link: letters that wait in its box until a short task comes by."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.errors import ProtocolError
from thinwire.exchange.spark.box import Answer, Box, Frame
from thinwire.exchange.spark.shared_memory import SharedMemory
from thinwire.protocol.forms import Header
from thinwire.protocol.messages import Message
from thinwire.transport.ports import Traffic

MOST_PER_VISIT = 64 << 20
"""Bytes that one visit takes along; a single letter may be longer."""
LONGEST_WAIT_S = 1.0
LAST_VISIT_S = 30.0
SPARK = -2
"""Who sums rounds, among their owners and among senders."""
EXACT = "float32"
BEAT = "beat"
"""What an agent says only to be heard; no visit ends for it."""


class Letter(NamedTuple):
    """A message on its way, numbered so that it is delivered once."""

    number: int
    other: int
    """Whom it is for, or whom it is from."""
    header: Header
    payload: Any
    """Bytes, memory, or something that several letters share; None where it has none."""


class Offer(NamedTuple):
    """A contribution that waits to be read."""

    generation: int
    weight: float
    values: Tensor | None


@dataclass(frozen=True)
class SparkWire:
    """A run's wire, as it travels to agents: the run's name, and a token to be let in with."""

    run: str
    token: str = field(repr=False)
    direct_bytes: int = 256 << 20
    """What the driver takes for one round, all contributions together; what is more is summed by a shuffle."""

    apart: bool = False
    """Whether each executor counts as a machine of its own, though several may be on one."""

    @property
    def place(self) -> str:
        """The name of this machine's boxes, as agents and their visitors know it."""
        return f"{self.run}-{_executor()}" if self.apart else self.run

    def link(self, worker: int, attempt: int) -> SparkLink:
        """An agent's end."""
        return SparkLink(self, worker, attempt)


class SparkLink:
    """An agent's link; see `thinwire.transport.ports.Link`. Visits come on the box's own thread."""

    def __init__(self, wire: SparkWire, worker: int, attempt: int) -> None:
        self.address = name_of(worker, attempt)
        self.refused = 0
        self.direct_bytes = wire.direct_bytes
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox: deque[Letter] = deque()
        self._lock = threading.Condition()
        self._sent = self._seen = 0
        self._offers: dict[str, Offer] = {}
        self._taken: set[tuple[str, str]] = set()
        self._gone = threading.Event()
        self._box = Box(wire.place, wire.token, self.address, self._serve)

    def connect(self, peers: Mapping[int, str]) -> None:
        return

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        with self._lock:
            self._sent += 1
            self._outbox.append(Letter(self._sent, peer, header, None if payload is None else SharedMemory.of(payload)))
            if header["t"] != BEAT:
                self._lock.notify_all()

    def receive(self, timeout_s: float) -> list[Message]:
        found: list[Message] = []
        try:
            first = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if first is not None:
                    found.append(first)
                first = self._inbox.get_nowait()
        except queue.Empty:
            return found

    def traffic(self) -> Traffic | None:
        return None  # Spark has the sockets

    def wake(self) -> None:
        self._inbox.put(None)

    def offer(self, key: str, offer: Offer | None) -> None:
        """Puts a contribution where a short task can read it, or takes it away."""
        with self._lock:
            if offer is None:
                self._offers.pop(key, None)
            else:
                self._offers[key] = offer

    def close(self) -> None:
        """Waits for a last visit, so that the last words are heard."""
        with self._lock:
            self._gone.clear()
            waiting = bool(self._outbox)
        if waiting:
            self._gone.wait(LAST_VISIT_S)
        self._box.close()

    # -- visits -----------------------------------------------------------------------------------------------------

    def _serve(self, header: dict[str, Any], frames: list[memoryview]) -> Iterator[Answer]:
        """Takes what a visitor brings and says so; then, within the visitor's patience, hands out what there is."""
        try:
            if header["t"] == "read":
                yield self._read(str(header["r"]), int(header["g"]), str(header["job"]))
                return
            if header["t"] == "hand":  # the mean of a round, which is known by its name and needs no number
                self._inbox.put(Message(SPARK, letter_of(header["header"]), frames[0] if frames else None))
                yield {"taken": True}, []
                return
            came = [
                Letter(int(number), int(sender), letter_of(inner), None if frame is None else frames[int(frame)])
                for number, sender, inner, frame in header["letters"]
            ]
            ack, wait_s = int(header["ack"]), float(header["wait"])
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"a visit is not what it must be: {error!r}") from error
        with self._lock:
            self._take_in(came)
            self._forget(ack)
        yield {"seen": self._seen}, []
        deadline = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        with self._lock:
            while not any(letter.header["t"] != BEAT for letter in self._outbox):
                if not self._lock.wait(max(0.0, deadline - time.monotonic())):
                    break
            found = self._hand_out()
        yield found

    def _take_in(self, letters: list[Letter]) -> None:
        for letter in letters:
            if letter.number > self._seen:
                self._seen = letter.number
                self._inbox.put(Message(letter.other, letter.header, letter.payload))

    def _forget(self, ack: int) -> None:
        """Letters that have come to where they go."""
        while self._outbox and self._outbox[0].number <= ack:
            self._outbox.popleft()
        if not self._outbox:
            self._gone.set()

    def _hand_out(self) -> Answer:
        letters: list[Any] = []
        frames: list[Frame] = []
        size = 0
        for letter in self._outbox:
            size += _size(letter.payload)
            if letters and size > MOST_PER_VISIT:
                break
            frame = None
            if letter.payload is not None:
                frame = len(frames)
                frames.append(letter.payload)
            letters.append([letter.number, letter.other, letter.header, frame])
        return {"letters": letters}, frames

    def _read(self, key: str, generation: int, job: str) -> Answer:
        """A contribution, once for each job: two tasks of one machine both come by."""
        with self._lock:
            offer = self._offers.get(key)
            if offer is None or offer.generation != generation or (key, job) in self._taken:
                return {"w": None}, []
            self._taken = {(k, j) for k, j in self._taken if k in self._offers} | {(key, job)}
        if offer.values is None:
            return {"w": 0.0}, []
        return {"w": offer.weight}, [SharedMemory.of(offer.values.numpy().data)]


def letter_of(header: Any) -> Header:
    """A letter's header, if it says what it is."""
    if not isinstance(header, dict) or not isinstance(header.get("t"), str):
        raise ValueError("a letter is a table that says what it is")
    return header


def _size(payload: Frame | None) -> int:
    return 0 if payload is None else payload.size if isinstance(payload, SharedMemory) else len(payload)


def _executor() -> int:
    """The process id of the executor that this Python worker belongs to: its parent is Python's daemon."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def name_of(worker: int, attempt: int) -> str:
    """An agent's name on its machine."""
    return f"{worker}.{attempt}"
