"""Shares the slots of a cluster among simultaneous fits of one process; fits that find no free slots wait."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator


class SlotQueue:
    """Slots of one cluster that fits hold or wait for. Fits are admitted in the order of their requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = itertools.count()
        self._waiting: list[int] = []
        self._taken = 0

    @property
    def waiting(self) -> int:
        """Number of fits that wait for slots."""
        with self._changed:
            return len(self._waiting)

    @contextlib.contextmanager
    def slots(self, wanted: int | None, there: int) -> Iterator[None]:
        """Waits until other fits of this process leave enough slots free, and holds the slots during the block.

        Args:
            wanted: number of workers; None takes all slots, and so does a number larger than the cluster.
            there: number of slots of the cluster.
        """
        count = min(wanted or there, there)
        with self._changed:
            ticket = next(self._tickets)
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] == ticket and self._taken + count <= there)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            self._taken += count
        try:
            yield
        finally:
            with self._changed:
                self._taken -= count
                self._changed.notify_all()


_lock = threading.Lock()
_queues: dict[str, SlotQueue] = {}


def queue_of(application: str) -> SlotQueue:
    """The queue of a Spark application."""
    with _lock:
        return _queues.setdefault(application, SlotQueue())
