"""What becomes of messages on a simulated network that is not at its best: lost, repeated, overtaken, cut off.

Sockets keep their order and lose nothing while a connection holds; one that breaks takes what was under way with it.
This is worse than that on purpose: what holds here holds there.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

LINGER_S = 0.4
"""By how much a message that is overtaken, or its repetition, comes later, at most."""


class Spell(NamedTuple):
    """Bad weather for a while."""

    kind: str
    nodes: frozenset[int]
    """Whose messages it concerns: those to and from one node, or those between two."""
    share: float
    until: float


class FaultInjection:
    """Draws what becomes of each message; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._spells: list[Spell] = []

    def turn(self, kind: str, nodes: Collection[int], share: float, until: float) -> None:
        """Something goes wrong until a moment: "lose", "repeat" or "shuffle" this share of messages, or "part" all."""
        self._spells.append(Spell(kind, frozenset(nodes), share, until))

    def delays(self, source: int, target: int, now: float) -> list[float]:
        """By how much later each copy of a message comes; nothing where it is lost."""
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
