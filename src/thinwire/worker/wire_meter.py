"""How fast the wire is, as sockets count: bytes that have arrived against the time in which some were on their way.

How long a round takes says little about it: packing, encryption, a busy machine and a peer that has yet to come make
rounds longer too, and sending less would not make them shorter.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from thinwire.transport.ports import Traffic

READINGS, LEAST = 24, 6
"""Newest readings that are remembered, and how many an estimate is made of at least."""
SURE, ENOUGH = 25, 4
"""Clock ticks of busy time that make an estimate sure at once, and that are enough once there are all the readings."""
BURSTS = 2
"""Times in a round that a worker's bytes set out, its parts and the sums that it owns. Each waits for a round trip."""


class _Reading(NamedTuple):
    round: int
    traffic: Traffic


class WireMeter:
    """Readings of a worker's sockets."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque(maxlen=READINGS + 1)
        self.counts = False
        """Whether the sockets of this run count at all."""

    def read(self, round: int, traffic: Traffic | None) -> None:
        """Takes a reading before a round is launched."""
        self.counts = traffic is not None
        if traffic is None:
            return
        newest = self._readings[-1].traffic if self._readings else traffic
        if traffic.sent_bytes < newest.sent_bytes:  # of another connection: it begins anew
            self._readings.clear()
        self._readings.append(_Reading(round, traffic))

    @property
    def bytes_per_s(self) -> float | None:
        """What the wire carries in a second, infinity where it is no limit; None while that is not certain."""
        busy_s, sent, rounds, tick_s = 0.0, 0, 0, 0.0
        newest_first = list(self._readings)[::-1]
        for count, (after, before) in enumerate(pairwise(newest_first), 1):
            busy_s += after.traffic.busy_s - before.traffic.busy_s
            sent += after.traffic.sent_bytes - before.traffic.sent_bytes
            rounds += after.round - before.round
            tick_s = after.traffic.tick_s
            if count >= LEAST and sent and busy_s > SURE * tick_s:
                return self._rate(sent, busy_s, rounds)
        if len(newest_first) <= READINGS and not (len(newest_first) > LEAST and not tick_s):
            return None
        return self._rate(sent, busy_s, rounds) if sent and busy_s > ENOUGH * tick_s else math.inf

    def _rate(self, sent: int, busy_s: float, rounds: int) -> float:
        """Without the time that only waits for the first answer of a burst, as far as that is the smaller part."""
        waiting_s = BURSTS * rounds * self._readings[-1].traffic.round_trip_s
        return sent / max(busy_s - waiting_s, busy_s / 4)
