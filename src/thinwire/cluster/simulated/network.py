"""A network in virtual time: each node has a full-duplex link to one switch, shared fairly among connections.

Messages from one node to another keep their order, as on one connection. Rates are max-min fair: no connection can get
more without taking from one that has no more itself. TCP approaches this on equal paths. Nothing is lost; a node that
is cut off neither sends nor receives until it is reconnected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.rules.period import Link

Floats = NDArray[np.float64]
SMALL_BYTES = 400
"""Smaller messages do not affect the rates of other messages."""
DONE_BYTES = 1e-3


class _Packet(NamedTuple):
    size_bytes: int
    deliver: Callable[[], None]


def fair_rates(active: NDArray[np.bool_], up: Floats, down: Floats) -> Floats:
    """The rate of each connection, from row to column, given the rates at which nodes can send and receive.

    >>> up = down = np.array([8.0, 8.0, 8.0])
    >>> fair_rates(np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=bool), up, down).tolist()
    [[0.0, 4.0, 4.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]]
    """
    rates = np.zeros(active.shape)
    left_up, left_down, open_ = up.astype(float), down.astype(float), active.copy()
    while open_.any():
        senders, receivers = open_.sum(1), open_.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share_up = np.where(senders > 0, left_up / senders, np.inf)
            share_down = np.where(receivers > 0, left_down / receivers, np.inf)
        least = min(share_up.min(), share_down.min())
        edge = least * (1 + 1e-9)
        settled = open_ & ((share_up <= edge)[:, None] | (share_down <= edge)[None, :])
        rates[settled] = least
        left_up = np.maximum(left_up - least * settled.sum(1), 0.0)
        left_down = np.maximum(left_down - least * settled.sum(0), 0.0)
        open_ &= ~settled
    return rates


class Network:
    """Transfers messages between nodes 0 … count - 1, and calls a function when each has arrived."""

    def __init__(self, time: VirtualTime, link: Link, count: int) -> None:
        self._time, self._link = time, link
        self._speed = np.full(count, link.bytes_per_s)
        self._left = np.zeros((count, count))
        self._rates = np.zeros((count, count))
        self._lines: dict[tuple[int, int], deque[_Packet]] = {}
        self._arrived: dict[tuple[int, int], float] = {}
        self._cut: dict[int, float] = {}
        self._seen = 0.0
        self._version = 0
        self._dirty = False
        self.sent_bytes = np.zeros(count)
        self._flowed, self._sending_s = np.zeros(count), np.zeros(count)

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Sends bytes from one node to another; transfers within a node take no time."""
        if source == target:
            self._time.at(self._time.now(), deliver)
            return
        self.sent_bytes[source] += size_bytes
        line = self._lines.setdefault((source, target), deque())
        if line or size_bytes > SMALL_BYTES or source in self._cut or target in self._cut:
            line.append(_Packet(size_bytes, deliver))
            if len(line) == 1:
                self._left[source, target] = size_bytes
                self._change()
        else:
            speed = float(min(self._speed[source], self._speed[target]))
            self._arrive(source, target, self._time.now() + size_bytes / speed, deliver)

    @property
    def round_trip_s(self) -> float:
        return 2 * self._link.latency_s

    def sent(self, node: int) -> tuple[int, float]:
        """Bytes that have left a node, and seconds in which it was sending, like a socket's statistics."""
        since = self._time.now() - self._seen
        left, rates = self._left[node], self._rates[node]
        flowed = self._flowed[node] + np.minimum(rates * since, left).sum()
        return int(flowed), float(self._sending_s[node] + ((left > 0) & (rates > 0)).any() * since)

    def busy(self, node: int) -> bool:
        """Whether a large transfer crosses a node's link."""
        return bool(self._left[node].any() or self._left[:, node].any())

    def cut(self, node: int, seconds: float) -> None:
        """Disconnects a node for a number of seconds."""
        until = self._time.now() + seconds
        self._cut[node] = max(until, self._cut.get(node, 0.0))
        self._change()
        self._time.at(until, lambda: self._heal(node))

    def drop(self, node: int) -> None:
        """Drops all messages to or from a node that have not arrived."""
        self._advance()
        for source, target in [pair for pair in self._lines if node in pair]:
            self._lines[source, target].clear()
            self._left[source, target] = self._rates[source, target] = 0.0
        self._change()

    def set_speed(self, bytes_per_s: float) -> None:
        """Sets the speed of every node's link."""
        self._speed[:] = bytes_per_s
        self._change()

    def _heal(self, node: int) -> None:
        if node in self._cut and self._cut[node] <= self._time.now():
            del self._cut[node]
            self._change()

    def _arrive(self, source: int, target: int, moment: float, deliver: Callable[[], None]) -> None:
        moment = max(moment + self._link.latency_s, self._arrived.get((source, target), 0.0))
        self._arrived[source, target] = moment
        self._time.at(moment, deliver)

    # -- flows ------------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Recomputes rates once for all changes at one moment."""
        if not self._dirty:
            self._dirty = True
            self._time.at(self._time.now(), self._settle)

    def _settle(self) -> None:
        self._dirty = False
        self._advance()
        active = self._left > 0
        for node in self._cut:
            active[node, :] = active[:, node] = False
        self._rates = fair_rates(active, self._speed, self._speed)
        self._version += 1
        if active.any():
            version = self._version
            soonest = float((self._left[active] / self._rates[active]).min())
            self._time.at(self._time.now() + soonest, lambda: self._complete(version))

    def _complete(self, version: int) -> None:
        if version == self._version:
            self._settle()

    def _advance(self) -> None:
        """Accounts for bytes transferred since the last change, and delivers completed messages."""
        now = self._time.now()
        flowed = self._rates * (now - self._seen)
        moving = self._left > 0
        self._flowed += np.minimum(flowed, self._left).sum(1)
        self._sending_s += (moving & (self._rates > 0)).any(1) * (now - self._seen)
        self._seen = now
        self._left = np.where(moving, self._left - flowed, 0.0)
        through = moving & (self._left <= np.maximum(DONE_BYTES, self._rates * max(1e-12, 2 * float(np.spacing(now)))))
        for source, target in np.argwhere(through).tolist():
            line = self._lines[source, target]
            self._arrive(source, target, now, line.popleft().deliver)
            self._left[source, target] = line[0].size_bytes if line else 0.0
