"""Relay's choices: how many fragments, how many bits, how much outer momentum."""

from __future__ import annotations

import math

ROOM = 0.95
"""Share of a step that one fragment's exchange may take."""
EASE = 0.5
"""And that of the whole model in more bits than are needed."""
SCALE_BITS = 32 / 256
SELDOM, MANY = 8, 8
"""Steps between two averages of a fragment from which replicas drift apart, and workers from which that costs more than
going too far does."""
WAITING = 0.03
"""Share of a step that is not worth a stale joint model."""


def exchange_ratio(exchange_s: float, step_s: float) -> float:
    """R: the steps a worker makes while one exchange of the whole float32 model is under way.

    >>> exchange_ratio(1.6, 0.1)
    16.0
    """
    return exchange_s / step_s


def num_fragments(ratio: float, bits: int, *, latency: float = 0.0, most: int = 64) -> int:
    """Fragments for which one compressed fragment's exchange fits inside one step, with a little room.

    F = max(1, ⌈R·(bits + 1/8) / (32·(0.95 − L))⌉)

    A block of 256 values has a scale of 32 bits beside them; L is the latency of an exchange in steps. The room
    matters: replies are taken up between steps, so that what takes a little more than one step takes two. Where the
    latency alone is half a step or more, one step is missed anyway and only the bytes have to fit.

    >>> num_fragments(14, 4), num_fragments(56, 4), num_fragments(94, 2), num_fragments(0.2, 4)
    (2, 8, 7, 1)
    >>> num_fragments(56, 4, latency=0.3), num_fragments(56, 4, latency=0.8)
    (12, 8)
    """
    room = ROOM - latency if latency < ROOM / 2 else ROOM
    return min(most, max(1, math.ceil(ratio * (bits + SCALE_BITS) / 32 / room)))


def fragments_in_passing(handling_s: float, step_s: float, *, share: float = 0.03, most: int = 64) -> int:
    """Fragments for which taking a snapshot and landing its reply cost a step no more than `share` of its time.

    A fragment that is averaged less often costs more than a few hundredths of a step do.

    >>> fragments_in_passing(0.06, 0.2), fragments_in_passing(0.0001, 0.2)
    (10, 1)
    """
    return min(most, max(1, math.ceil(handling_s / (share * step_s))))


def choose_bits(ratio: float) -> int:
    """Two bits where the wire is slower than 64 steps an exchange, else four.

    >>> choose_bits(16), choose_bits(64), choose_bits(107)
    (4, 4, 2)
    """
    return 2 if ratio > 64 else 4


def richest_bits(ratio: float, *, latency: float = 0.0) -> int:
    """The widest codec in which the whole model crosses with ease within one step, else what `choose_bits` says.

    R·(bits + 1/8) / 32 ≤ 0.5 − L

    With ease: a round that takes most of a step misses every other one, which costs more than fewer bits do.

    >>> richest_bits(0.4), richest_bits(0.9), richest_bits(1.5), richest_bits(11.6), richest_bits(107.8)
    (32, 16, 8, 4, 2)
    >>> richest_bits(0.7, latency=0.2)
    8
    """
    for bits in (32, 16, 8):
        if ratio * (bits + 1 / 8) / 32 <= EASE - latency:
            return bits
    return choose_bits(ratio)


def worth_waiting(ratio: float, latency: float, *, waits: bool = False) -> bool:
    """Whether an exchange of the whole float32 model takes so little of a step that overlapping it gains nothing.

    Who waits already goes on with it up to twice as much.

    >>> worth_waiting(0.01, 0.01), worth_waiting(0.05, 0.0), worth_waiting(0.05, 0.0, waits=True)
    (True, False, True)
    """
    return ratio + latency <= (2 if waits else 1) * WAITING


def choose_momentum(steps: float, workers: int) -> float:
    """Outer momentum: none where a value is averaged every few steps, or over few workers, else a mild one.

    Fresh averages follow synchronous SGD by themselves. Momentum moves the joint model 1/(1 − μ) times as far as the
    replicas went, which at the learning rate that synchronous SGD was tuned for is too far.

    >>> choose_momentum(2, 8), choose_momentum(8, 8), choose_momentum(8, 4)
    (0.0, 0.3, 0.0)
    """
    return 0.3 if steps >= SELDOM and workers >= MANY else 0.0
