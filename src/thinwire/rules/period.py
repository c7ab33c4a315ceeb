"""When the next round is due, and how long an exchange takes against a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """What an exchange costs: a fixed part and one per byte that a worker sends."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s

    def times(self, factor: float) -> Link:
        """A link that is so many times faster.

        >>> Link(0.5, 1e6).times(2)
        Link(latency_s=0.25, bytes_per_s=2000000.0)
        """
        return Link(self.latency_s / factor, self.bytes_per_s * factor)


ALIKE = 0.1
"""Sizes whose standard deviation is below this share of their mean count as one."""
DOUBT = 2.0
"""Standard errors that a slope must be above zero."""


def fit_link(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link that explains measured rounds, by least squares, with no part below zero.

    A busy machine makes rounds longer at random, whatever their size. A slope that is less than twice its standard
    error may be chance, and is not held against the wire: bytes would be saved at the model's cost, and rounds would
    take as long as before.

    >>> fit_link([1e6, 3e6], [0.5, 1.0])
    Link(latency_s=0.25, bytes_per_s=4000000.0)
    >>> fit_link([1e6, 1e6], [0.5, 1.5])
    Link(latency_s=0.0, bytes_per_s=1000000.0)
    >>> fit_link([1e6, 3e6], [1.0, 1.0]).latency_s
    1.0
    >>> fit_link([1e6, 1e6, 3e6, 3e6], [1.0, 1.0, 1.0, 9.0]).bytes_per_s
    inf

    With one size only, or nearly so, the two parts cannot be told apart, and all of it counts as the price of bytes.

    >>> fit_link([61380, 62304], [0.0355, 0.0354]).latency_s
    0.0
    """
    count = len(sizes_bytes)
    mean_size, mean_s = sum(sizes_bytes) / count, sum(seconds) / count
    spread = sum((b - mean_size) ** 2 for b in sizes_bytes)
    shared = sum((b - mean_size) * (s - mean_s) for b, s in zip(sizes_bytes, seconds, strict=True))
    most = slope = mean_s / mean_size
    if spread > ALIKE**2 * count * mean_size**2:
        best = shared / spread
        left = sum((s - mean_s - best * (b - mean_size)) ** 2 for b, s in zip(sizes_bytes, seconds, strict=True))
        error = math.sqrt(left / (count - 2) / spread) if count > 2 else 0.0
        slope = min(most, best) if best > DOUBT * error else 0.0
    return Link(mean_s - slope * mean_size, 1.0 / slope if slope else math.inf)


def balanced_period(exchange_s: float, step_s: float, *, ratio: float = 5.0) -> int:
    """Steps between rounds for which computing takes `ratio` times as long as communicating.

    τ ≈ 5 S / C(b)

    >>> balanced_period(1.1, 0.095)
    58

    SparkNet §3 as used in MPCA SGD, Table 1.
    """
    return max(1, round(ratio * exchange_s / step_s))


def spent(loss: float, budget: float) -> bool:
    """Whether the loss summed up since the last exchange has passed the budget, so that the next is due.

    L > L_cut

    >>> spent(4.5, 4.0), spent(3.5, 4.0)
    (True, False)

    DeepSpark (Kim et al. 2016), Algorithm 1: as the loss of a step falls, more steps fit into the budget.
    """
    return loss > budget
