"""Relay's choices: how many fragments, how many bits, how much outer momentum."""

from __future__ import annotations

import math


def exchange_ratio(exchange_s: float, step_s: float) -> float:
    """R: the steps a worker makes while one exchange of the whole float32 model is under way.

    >>> exchange_ratio(1.6, 0.1)
    16.0
    """
    return exchange_s / step_s


def num_fragments(ratio: float, bits: int, *, most: int = 64) -> int:
    """Fragments for which one compressed fragment's exchange fits inside one step.

    F = max(1, ⌈R·bits/32⌉)

    >>> num_fragments(16, 4), num_fragments(64, 4), num_fragments(107, 2), num_fragments(0.2, 4)
    (2, 8, 7, 1)
    """
    return min(most, max(1, math.ceil(ratio * bits / 32)))


def fragments_in_passing(handling_s: float, step_s: float, *, share: float = 0.01, most: int = 64) -> int:
    """Fragments for which taking a snapshot and landing its reply cost a step no more than `share` of its time.

    >>> fragments_in_passing(0.06, 0.2), fragments_in_passing(0.0001, 0.2)
    (30, 1)
    """
    return min(most, max(1, math.ceil(handling_s / (share * step_s))))


def choose_bits(ratio: float) -> int:
    """Two bits where the wire is slower than 64 steps an exchange, else four.

    >>> choose_bits(16), choose_bits(64), choose_bits(107)
    (4, 4, 2)
    """
    return 2 if ratio > 64 else 4


def choose_momentum(ratio: float, workers: int) -> float:
    """Outer momentum: mild, and milder where rounds are fresh or workers few.

    >>> choose_momentum(64, 8), choose_momentum(16, 8), choose_momentum(64, 2)
    (0.5, 0.3, 0.3)
    """
    return 0.3 if ratio <= 16 or workers <= 2 else 0.5
