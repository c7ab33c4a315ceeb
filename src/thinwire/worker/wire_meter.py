"""How fast the wire is, as sockets count: bytes that have arrived against the time in which some were on their way.

How long a round takes says little about it: packing, encryption, a busy machine and a peer that has yet to come make
rounds longer too, and sending less would not make them shorter.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from thinwire.transport.ports import Traffic

READINGS, LEAST = 48, 6
"""Readings that are remembered, and the fewest that an estimate is made of."""
GROUP_TICKS, GROUP_READINGS, GROUPS = 16, 2, 5
"""The least busy time of a group of readings, in clock ticks, its least readings, and how many newest groups count."""
ENOUGH = 4
"""Ticks of busy time that suffice once all readings are there and make no group."""
AGREE = 1.5
"""Factor by which the fastest group may exceed the second fastest and the newest one."""
BURSTS = 2
"""Bursts that a worker sends in a round: its parts, and the sums that it owns. Each waits for a round trip."""


class _Reading(NamedTuple):
    round: int
    traffic: Traffic


class WireMeter:
    """Readings of a worker's sockets."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=READINGS + 1)
        self.counts = False
        """Whether the sockets of this run count bytes and busy time."""

    def read(self, round: int, traffic: Traffic | None) -> None:
        """Takes a reading before a round is launched."""
        self.counts = traffic is not None
        if traffic is None:
            return
        newest = self._readings[-1].traffic if self._readings else traffic
        if traffic.sent_bytes < newest.sent_bytes:  # of a new connection, whose counts begin at zero
            self._readings.clear()
        self._readings.append(_Reading(round, traffic))

    @property
    def round_trip_s(self) -> float:
        return self._readings[-1].traffic.round_trip_s if self._readings else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """What the wire carries in a second, infinity where it is no limit; None while that is not certain.

        Readings are taken in groups, and the fastest group counts: a busy machine acknowledges late, so that the wire
        looks slower than it is, never faster. If the newest group or all other groups are much slower than the fastest,
        the estimate is not certain: the wire may have changed.
        """
        if len(self._readings) <= LEAST:
            return None
        rates, most = self._group_rates(), len(self._readings) - 1
        if len(rates) > 1:
            second, best = sorted(rates)[-2:]
            return best if best <= AGREE * min(second, rates[0]) else None
        if most < READINGS:
            return None
        enough = self._busy_s(most, 0) > ENOUGH * self._readings[-1].traffic.tick_s
        return self._rate(most, 0) if enough else math.inf

    def _group_rates(self) -> list[float]:
        """The rate of each group, the newest first."""
        least_s, most = GROUP_TICKS * self._readings[-1].traffic.tick_s, len(self._readings) - 1
        found, last = list[float](), 0
        for first in range(1, most + 1):
            busy_s = self._busy_s(first, last)
            if first - last >= GROUP_READINGS and busy_s > 0 and busy_s >= least_s:
                found.append(self._rate(first, last))
                last = first
                if len(found) == GROUPS:
                    break
        return found

    def _busy_s(self, first: int, last: int) -> float:
        """Busy time from one reading to another, both counted back from the newest."""
        return self._readings[-1 - last].traffic.busy_s - self._readings[-1 - first].traffic.busy_s

    def _rate(self, first: int, last: int) -> float:
        """Bytes per second of busy time, without the time that only waits for the first answer of a burst."""
        before, after = self._readings[-1 - first], self._readings[-1 - last]
        busy_s = after.traffic.busy_s - before.traffic.busy_s
        waiting_s = BURSTS * (after.round - before.round) * after.traffic.answer_s
        return (after.traffic.sent_bytes - before.traffic.sent_bytes) / max(busy_s - waiting_s, busy_s / 4, 1e-9)
