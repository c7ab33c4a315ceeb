"""Limits how often each worker may send the driver messages that are stored or logged."""

from __future__ import annotations

from thinwire.protocol.messages import Apart, Caught, Epoch, Evaluated, Happened, Saved

COUNTED = tuple(kind.tag for kind in (Happened, Epoch, Evaluated, Saved, Caught, Apart))
"""Kinds of messages that are counted. Heartbeats become at most one event a second, and results come once."""
BURST, PER_S = 10_000, 1_000


class RateLimit:
    """A token bucket for each worker.

    >>> allowance = RateLimit()
    >>> sum(allowance.takes(3, "event", now=0.0) for _ in range(20_000)), allowance.takes(3, "beat", now=0.0)
    (10000, True)
    >>> sum(allowance.takes(3, "event", now=2.0) for _ in range(20_000))
    2000
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, float]] = {}
        """Tokens left of each worker, and the time at which they were counted."""

    def takes(self, worker: int, kind: str, *, now: float) -> bool:
        """Whether a message may be accepted."""
        if kind not in COUNTED:
            return True
        left, since = self._left.get(worker, (float(BURST), now))
        left = min(float(BURST), left + (now - since) * PER_S)
        self._left[worker] = (left - 1.0 if left >= 1.0 else left, now)
        return left >= 1.0
