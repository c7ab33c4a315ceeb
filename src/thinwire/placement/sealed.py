"""Moves a group's tensors between processes, authenticated and encrypted with the run's keys.

The carrier has a link of its own beside the worker's: CURVE sockets, which only holders of the keys can use. When a
member's process ends or leaves the meeting, transfers of the other members with it fail.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import zmq
from torch import Tensor

from thinwire.transport.zmq import MAX_PAYLOAD_BYTES, ZmqLink, ZmqWire

APART = 1 << 40
"""Added to a worker's number, so that the coordinator does not take this link for a worker's."""
GREETING_INTERVAL_S = 0.5
"""Seconds after which a member repeats its greeting while it waits for an answer."""
POLL_S = 0.1
MOST_BYTES = MAX_PAYLOAD_BYTES // 2
Key = tuple[str, int, int]
"""The name of a meeting, the sender, and the tag of a transfer."""


class Sealed:
    """One member's end; see `thinwire.placement.crew.Carrier`."""

    def __init__(self, part: int, size: int, wire: ZmqWire, worker: int, attempt: int) -> None:
        self._part, self._size = part, size
        self._link: ZmqLink = wire.link(worker + APART, attempt)
        self._name = ""
        self._patience_s, self._swaps = math.inf, 0
        self._arrivals: dict[str, dict[int, str]] = {}
        """By meeting, the members that have arrived, with their addresses."""
        self._addresses: dict[str, dict[int, str]] = {}
        """By meeting, the addresses of all members, as part 0 has sent them."""
        self._arrived: dict[Key, list[memoryview]] = {}
        self._whole: set[Key] = set()
        self._gone: set[int] = set()
        self._monitors: dict[int, Any] = {}
        self._answered: set[int] = set()
        """Members that have answered this one in the present meeting."""
        self._connected = False
        """Whether messages to a member now use the connection that stays."""
        self._greeted: set[int] = set()
        """Members that were told that the connection stays."""

    @property
    def address(self) -> str:
        return self._link.address.removeprefix("tcp://")

    # -- meeting ----------------------------------------------------------------------------------------------------

    def meet(self, address: str, name: str, timeout_s: float) -> None:
        self._name, self._patience_s, self._swaps, self._gone = name, timeout_s, 0, set()
        self._answered, self._greeted, self._connected = set(), set(), False
        self._arrivals = {name: self._arrivals.get(name, {}) | {self._part: self._link.address}}
        self._addresses = {name: self._addresses[name]} if name in self._addresses else {}
        deadline = time.monotonic() + timeout_s
        self._connect({} if self._part == 0 else {0: f"tcp://{address}"})
        said = -math.inf
        while name not in self._addresses:
            if self._part == 0 and len(self._arrivals[name]) == self._size:
                self._addresses[name] = dict(self._arrivals[name])
                break
            now = time.monotonic()
            if now >= deadline:
                absent = sorted(set(range(self._size)) - set(self._arrivals[name]))
                raise RuntimeError(f"timed out waiting for peers {absent}")
            if self._part and now - said >= GREETING_INTERVAL_S:
                said = now
                self._send_message(0, "here", at=self._link.address)
            self._handle_messages(POLL_S)
        everyone, said = self._addresses[name], -math.inf
        self._connect({part: at for part, at in everyone.items() if part != self._part})
        self._connected, others = True, set(everyone) - {self._part}
        # Once both sides have answered, monitors report the end of a connection.
        while not (self._answered >= others and self._greeted >= others):
            now = time.monotonic()
            if now >= deadline:
                raise RuntimeError("timed out waiting for peers to answer")
            if now - said >= GREETING_INTERVAL_S:
                said = now
                for part in others - self._answered:
                    if self._part == 0:
                        self._send_message(part, "all", at={str(each): at for each, at in everyone.items()})
                    self._send_message(part, "hi")
            self._handle_messages(POLL_S)
            if self._gone - self._answered:
                raise RuntimeError(f"connection closed by peer {min(self._gone)}")

    def _connect(self, peers: dict[int, str]) -> None:
        """Connects again: connections of an earlier meeting may lead to processes that are gone."""
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        self._monitors = {}
        self._link.connect({})
        self._link.connect(peers)
        self._monitors = {part: self._link.watch(part, zmq.EVENT_DISCONNECTED) for part in peers}

    def leave(self) -> None:
        name, self._name = self._name, ""
        if not name:
            return
        for part in range(self._size):
            if part != self._part:
                self._send_message(part, "gone", name=name)
        self._arrived, self._whole = {}, set()

    def close(self) -> None:
        """Closes the link and its monitors."""
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        self._link.close()

    def _send_message(
        self, part: int, kind: str, *, name: str | None = None, payload: memoryview | None = None, **more: Any
    ) -> None:
        header = {"t": kind, "a": 0, "n": self._name if name is None else name, "p": self._part, **more}
        self._link.send(part, header, payload)

    def _handle_messages(self, timeout_s: float) -> None:
        """Handles arrived messages, after waiting up to `timeout_s` for the first."""
        for message in self._link.receive(timeout_s):
            header, payload = message.header, message.payload
            name, part = header.get("n"), header.get("p")
            if not isinstance(name, str) or type(part) is not int or (message.sender - APART) % self._size != part:
                continue
            kind, at = header["t"], header.get("at")
            if kind == "here" and isinstance(at, str):
                self._arrivals.setdefault(name, {})[part] = at
                # The member has missed the answer.
                if name in self._addresses and name == self._name and self._part == 0:
                    everyone = {str(each): where for each, where in self._addresses[name].items()}
                    self._send_message(part, "all", at=everyone)
            elif kind == "all" and isinstance(at, dict):
                self._addresses[name] = {int(each): str(where) for each, where in at.items()}
            elif kind == "hi" and name == self._name and self._connected:
                self._send_message(part, "ho")
                self._greeted.add(part)
            elif kind == "ho" and name == self._name:
                self._answered.add(part)
            elif kind == "gone" and name == self._name:
                self._gone.add(part)
            elif kind == "piece" and payload is not None:
                key = name, part, int(header.get("g", 0))
                self._arrived.setdefault(key, []).append(payload)
                if header.get("last"):
                    self._whole.add(key)
        for part, monitor in self._monitors.items():
            while monitor.poll(0):
                monitor.recv_multipart()
                self._gone.add(part)

    # -- moving -----------------------------------------------------------------------------------------------------

    def send(self, piece: Tensor, to: int, tag: int) -> Work:
        self._post(piece, to, tag)
        return Work(self, {})

    def receive(self, into: Tensor, of: int, tag: int) -> Work:
        self._require_meeting()
        return Work(self, {(self._name, of, tag): into})

    def swap(self, came: Tensor, given: Tensor) -> Work:
        self._swaps += 1
        pieces, places = torch.chunk(given, self._size), torch.chunk(came, self._size)
        places[self._part].copy_(pieces[self._part])
        others = [part for part in range(self._size) if part != self._part]
        for part in others:
            self._post(pieces[part], part, -self._swaps)
        return Work(self, {(self._name, part, -self._swaps): places[part] for part in others})

    def enter_world(self) -> None:
        raise RuntimeError("torch.distributed's default process group has no keys")

    def _post(self, piece: Tensor, to: int, tag: int) -> None:
        self._require_meeting()
        if to in self._gone:
            raise RuntimeError(f"connection closed by peer {to}")
        data = memoryview(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for start in range(0, max(1, len(data)), MOST_BYTES):
            part = data[start : start + MOST_BYTES]
            self._send_message(to, "piece", payload=part, g=tag, last=start + MOST_BYTES >= len(data))

    def _require_meeting(self) -> None:
        if not self._name:
            raise RuntimeError("the workers of its group have not met")

    def await_all(self, wanted: dict[Key, Tensor]) -> None:
        """Waits for transfers, and copies each into its tensor."""
        deadline = time.monotonic() + self._patience_s
        while not self.has(wanted):
            missing = {part for name, part, tag in wanted if (name, part, tag) not in self._whole}
            if missing & self._gone:
                raise RuntimeError(f"connection closed by peer {min(missing & self._gone)}")
            if time.monotonic() >= deadline or any(name != self._name for name, _, _ in wanted):
                raise RuntimeError(f"timed out waiting for peers {sorted(missing)}")
            self._handle_messages(POLL_S)
        for key, into in wanted.items():
            self._whole.discard(key)
            data = bytearray().join(self._arrived.pop(key))
            if len(data) != into.numel() * into.element_size():
                raise RuntimeError(f"peer {key[1]} sent {len(data)} bytes for a tensor of another size")
            into.copy_(torch.frombuffer(data, dtype=into.dtype).view(into.shape))

    def has(self, wanted: dict[Key, Tensor]) -> bool:
        """Whether all of these transfers have arrived."""
        return all(key in self._whole for key in wanted)

    def is_over(self, wanted: dict[Key, Tensor]) -> bool:
        """Whether all of these transfers have arrived or failed."""
        self._handle_messages(0.0)
        return self.has(wanted) or any(key[1] in self._gone for key in wanted if key not in self._whole)


class Work:
    """One transfer under way; see `thinwire.placement.crew.Work`."""

    def __init__(self, carrier: Sealed, wanted: dict[Key, Tensor]) -> None:
        self._carrier, self._wanted = carrier, wanted

    def is_completed(self) -> bool:
        return self._carrier.is_over(self._wanted)

    def wait(self) -> None:
        wanted, self._wanted = self._wanted, {}
        if wanted:
            self._carrier.await_all(wanted)
