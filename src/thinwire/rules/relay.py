"""Relay's choices: how many fragments, how many bits, how much outer momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROOM = 0.95
"""Share of a step that one fragment's exchange may take."""
EASE = 0.5
"""And that of the whole model in more bits than are needed."""
SCALE_BITS = 32 / 256
LEFT = {32: 0.0, 16: 0.0, 8: 0.0, 4: 0.016, 2: 0.118, 1: 0.364}
"""Share of a Gaussian vector's square that a codec of so many bits leaves to error feedback."""
PACKED = (4, 2, 1)
"""Bits to choose from where the model does not cross with ease, the richest first."""
NOISE = 0.8
"""Over the number of workers: the share by which a richer codec's age may pass the least. Fewer bits add noise too, of
which the mean over many workers keeps little."""
SELDOM, MANY = 5, 8
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


def round_steps(ratio: float, bits: int, fragments: int, *, latency: float = 0.0) -> int:
    """Steps that the round of one fragment takes.

    T = max(1, ⌈L + R·(bits + 1/8) / (32·F) + 0.05⌉)

    A block of 256 values has a header of 32 bits beside them; L is what a round takes beside its bytes, in steps. The
    room of a twentieth matters: replies are taken up between steps, so that what takes a little more than one step
    takes two.

    >>> round_steps(14, 4, 2), round_steps(14, 4, 1), round_steps(64, 1, 3), round_steps(64, 1, 3, latency=0.5)
    (1, 2, 1, 2)
    """
    return max(1, math.ceil(latency + ratio * (bits + SCALE_BITS) / 32 / fragments + 1 - ROOM - 1e-9))


def age(ratio: float, bits: int, fragments: int, *, latency: float = 0.0) -> float:
    """Steps until what one replica has learnt is in the joint model, and in the others' next contributions, on average.

    age = T·(2 + F·(1/2 + ε / (1 − ε)))

    A fragment comes round every F·T steps: what a replica has learnt waits for half of that, and takes a round. What
    the others contribute meanwhile takes another. The codec leaves a share ε of it for the fragment's next round, which
    leaves as much of that again; ε is `LEFT`.

    >>> round(age(64, 4, 9), 2), round(age(64, 2, 5), 2), round(age(64, 1, 3), 2)  # 2 + 9·(1/2 + 0.016/0.984)
    (6.65, 5.17, 5.22)
    """
    left = LEFT[bits]
    return round_steps(ratio, bits, fragments, latency=latency) * (2 + fragments * (0.5 + left / (1 - left)))


def freshest(
    ratio: float,
    choice: Sequence[int] = PACKED,
    *,
    workers: int = 8,
    latency: float = 0.0,
    least: int = 1,
    most: int = 64,
) -> tuple[int, int]:
    """Bits and fragments under which the joint model is youngest, or nearly so in more bits.

    age ≤ (1 + 0.8 / K) · least age

    >>> [freshest(ratio) for ratio in (4, 10, 16, 64, 256)]
    [(4, 1), (2, 1), (2, 2), (2, 5), (2, 18)]
    >>> [freshest(ratio, workers=32) for ratio in (4, 10, 16, 64, 256)]
    [(4, 1), (2, 1), (1, 1), (2, 5), (1, 10)]
    >>> freshest(16, latency=1), freshest(16, latency=8)  # few rounds where each takes long whatever it carries
    ((2, 2), (4, 1))
    >>> freshest(64, (4,)), freshest(16, least=4, most=4)
    ((4, 9), (4, 4))
    """
    ages = {
        (bits, count): age(ratio, bits, count, latency=latency)
        for bits in sorted(choice, reverse=True)
        for count in range(least, max(least, most) + 1)
    }
    best = min(ages.values())
    bits = next(bits for (bits, _), steps in ages.items() if steps <= (1 + NOISE / workers) * best)
    return min((key for key in ages if key[0] == bits), key=lambda key: ages[key])


def fragments_in_passing(handling_s: float, step_s: float, *, share: float = 0.03, most: int = 64) -> int:
    """Fragments for which taking a snapshot and landing its reply cost a step no more than `share` of its time.

    A fragment that is averaged less often costs more than a few hundredths of a step do.

    >>> fragments_in_passing(0.06, 0.2), fragments_in_passing(0.0001, 0.2)
    (10, 1)
    """
    return min(most, max(1, math.ceil(handling_s / (share * step_s))))


def widths(ratio: float, *, latency: float = 0.0) -> tuple[int, ...]:
    """The widest codec in which the whole model crosses with ease within one step; where there is none, `PACKED`.

    R·(bits + 1/8) / 32 ≤ 0.5 − L

    With ease: a round that takes most of a step misses every other one, which costs more than fewer bits do.

    >>> widths(0.4), widths(0.9), widths(1.5), widths(11.6)
    ((32,), (16,), (8,), (4, 2, 1))
    >>> widths(0.7, latency=0.2)
    (8,)
    """
    for bits in (32, 16, 8):
        if ratio * (bits + SCALE_BITS) / 32 <= EASE - latency:
            return (bits,)
    return PACKED


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

    >>> choose_momentum(2, 8), choose_momentum(5, 8), choose_momentum(5, 4)
    (0.0, 0.3, 0.0)
    """
    return 0.3 if steps >= SELDOM and workers >= MANY else 0.0
