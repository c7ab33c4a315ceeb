"""An agent's link: letters that wait in its box until a short task comes by."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.engine.ports import Header, Message
from thinwire.exchange.spark.box import Answer, Box

MOST_PER_VISIT = 64 << 20
"""Bytes that one visit takes along; a single letter may be longer."""
LAST_VISIT_S = 30.0


class Letter(NamedTuple):
    """A message on its way, numbered so that it is delivered once."""

    number: int
    other: int
    """Whom it is for, or whom it is from."""
    header: Header
    payload: Any
    """Bytes, or something that several letters share; None where it has none."""


class Offer(NamedTuple):
    """A contribution that waits to be read."""

    generation: int
    weight: float
    values: Tensor | None


@dataclass(frozen=True)
class SparkWire:
    """A run's wire, as it travels to agents: the run's name, and a token to be let in with."""

    run: str
    token: str

    def link(self, worker: int, attempt: int) -> SparkLink:
        """An agent's end."""
        return SparkLink(self, worker, attempt)


class SparkLink:
    """An agent's link; see `thinwire.engine.ports.Link`. Visits come on the box's own thread."""

    def __init__(self, wire: SparkWire, worker: int, attempt: int) -> None:
        self.address = name_of(worker, attempt)
        self.refused = 0
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox: deque[Letter] = deque()
        self._lock = threading.Lock()
        self._sent = self._seen = 0
        self._offers: dict[str, Offer] = {}
        self._taken: set[tuple[str, str]] = set()
        self._gone = threading.Event()
        self._box = Box(wire.run, wire.token, self.address, self._serve)

    def connect(self, peers: Mapping[int, str]) -> None:
        return

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        with self._lock:
            self._sent += 1
            self._outbox.append(Letter(self._sent, peer, header, None if payload is None else bytes(payload)))

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

    def _serve(self, header: dict[str, Any], frames: list[bytearray]) -> Answer:
        if header["t"] == "read":
            return self._read(str(header["r"]), int(header["g"]), str(header["job"]))
        self._take_in(header, frames)
        return self._hand_out(int(header["ack"]))

    def _take_in(self, header: dict[str, Any], frames: list[bytearray]) -> None:
        for number, sender, inner, frame in header["letters"]:
            if int(number) > self._seen:
                self._seen = int(number)
                payload = None if frame is None else memoryview(frames[int(frame)])
                self._inbox.put(Message(int(sender), inner, payload))

    def _hand_out(self, ack: int) -> Answer:
        letters: list[Any] = []
        frames: list[memoryview] = []
        with self._lock:
            while self._outbox and self._outbox[0].number <= ack:
                self._outbox.popleft()
            if not self._outbox:
                self._gone.set()
            size = 0
            for letter in self._outbox:
                size += 0 if letter.payload is None else len(letter.payload)
                if letters and size > MOST_PER_VISIT:
                    break
                frame = None
                if letter.payload is not None:
                    frame = len(frames)
                    frames.append(memoryview(letter.payload))
                letters.append([letter.number, letter.other, letter.header, frame])
        return {"letters": letters, "seen": self._seen}, frames

    def _read(self, key: str, generation: int, job: str) -> Answer:
        """A contribution, once for each job: two tasks of one machine both come by."""
        with self._lock:
            offer = self._offers.get(key)
            if offer is None or offer.generation != generation or (key, job) in self._taken:
                return {"w": None}, []
            self._taken = {(k, j) for k, j in self._taken if k in self._offers} | {(key, job)}
        if offer.values is None:
            return {"w": 0.0}, []
        return {"w": offer.weight}, [offer.values.numpy().data]


def name_of(worker: int, attempt: int) -> str:
    """An agent's name on its machine."""
    return f"{worker}.{attempt}"
