"""Fits of one process that run at the same time share the slots of their cluster, and those that do not fit wait."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator


class Turns:
    """Who has how many slots of one cluster. Fits are let in by the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = itertools.count()
        self._waiting: list[int] = []
        self._taken = 0

    @property
    def waiting(self) -> int:
        """How many fits wait for slots."""
        with self._changed:
            return len(self._waiting)

    @contextlib.contextmanager
    def slots(self, wanted: int | None, there: int) -> Iterator[None]:
        """Waits until a fit's slots are free of other fits of this process, and holds them meanwhile.

        Args:
            wanted: how many workers it has; None takes all, and so does a number that the cluster never has.
            there: how many slots the cluster has.
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
_turns: dict[str, Turns] = {}


def turns_of(application: str) -> Turns:
    """Those of a Spark application."""
    with _lock:
        return _turns.setdefault(application, Turns())
