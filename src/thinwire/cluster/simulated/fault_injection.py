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


class Spell(NamedTuple):
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
        self._spells: list[Spell] = []

    def turn(self, kind: str, nodes: Collection[int], share: float, until: float) -> None:
        """Begins a fault until a moment: "lose", "repeat" or "shuffle" a share of messages, or "part" for all."""
        self._spells.append(Spell(kind, frozenset(nodes), share, until))

    def delays(self, source: int, target: int, now: float) -> list[float]:
        """The delay of each copy of a message; empty for a lost message."""
        found = [0.0]
        if not self._spells:
            return found
        self._spells = [spell for spell in self._spells if spell.until > now]
        for spell in self._spells:
            concerned = spell.nodes <= {source, target}
            if not concerned or self._random.random() >= spell.share:
                continue
            if spell.kind in ("lose", "part"):
                return []
            late = self._random.uniform(0.0, LINGER_S)
            found = [*found, late] if spell.kind == "repeat" else [late]
        return found
