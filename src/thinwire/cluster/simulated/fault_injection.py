"""Faults of messages on a simulated network: messages are lost, repeated, reordered or cut off.

Real sockets keep messages in order and lose none while a connection holds; a broken connection loses messages in
transit. The injected faults are worse on purpose, so that a protocol that survives them survives real networks.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

LINGER_S = 0.4
"""Longest delay of a reordered or repeated message."""


class MessageFault(NamedTuple):
    """A fault that lasts for a while."""

    kind: str
    nodes: frozenset[int]
    """The affected messages: those to and from one node, or those between two nodes."""
    share: float
    until: float


class FaultInjection:
    """Draws the faults of each message; the same seed draws the same faults."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._faults: list[MessageFault] = []

    def begin(self, kind: str, nodes: Collection[int], share: float, until: float) -> None:
        """Begins a fault until a moment: "lose", "repeat" or "shuffle" a share of messages, or "part" for all."""
        self._faults.append(MessageFault(kind, frozenset(nodes), share, until))

    def delays(self, source: int, target: int, now: float) -> list[float]:
        """The delay of each copy of a message; empty for a lost message."""
        found = [0.0]
        if not self._faults:
            return found
        self._faults = [fault for fault in self._faults if fault.until > now]
        for fault in self._faults:
            concerned = fault.nodes <= {source, target}
            if not concerned or self._random.random() >= fault.share:
                continue
            if fault.kind in ("lose", "part"):
                return []
            late = self._random.uniform(0.0, LINGER_S)
            found = [*found, late] if fault.kind == "repeat" else [late]
        return found
