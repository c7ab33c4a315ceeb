"""Which machines agents are on, and how a task comes to each: over a row of an RDD that lies there."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import Any

from thinwire.exchange.spark.link import SparkWire
from thinwire.exchange.spark.tasks import say_where

LOOK_S, LONGEST_LOOK_S = 0.5, 8.0
"""Between two looks while somebody is not seen: longer each time that nothing new was found."""


class Places:
    """Machines as they were found, each with an RDD and the row of it that lies there."""

    def __init__(self, context: Any, wire: SparkWire) -> None:
        self._context, self._wire = context, wire
        self._found: dict[str, tuple[Any, int]] = {}
        self._lock = threading.Lock()
        self._open = True
        self._executors = ""
        self._at, self._wait_s = 0.0, LOOK_S

    def machines(self) -> list[str]:
        with self._lock:
            return list(self._found)

    def of(self, machine: str) -> tuple[Any, int] | None:
        """An RDD, and the number of its partition that lies on a machine."""
        with self._lock:
            return self._found.get(machine)

    def everywhere(self) -> Any:
        """An RDD with rows on all machines; None where there are none."""
        with self._lock:
            markers = self._markers()
        return self._context.union(markers) if len(markers) > 1 else markers[0] if markers else None

    def changed(self) -> bool:
        """Whether executors have come or gone."""
        return self._executors != self._now()

    def due(self, now: float) -> bool:
        """Whether it is time for another look, where somebody is not seen."""
        return now - self._at > self._wait_s

    def doubt(self) -> None:
        """Something went wrong on a machine: the next look comes soon."""
        self._executors, self._wait_s = "", LOOK_S

    def leave(self, machine: str) -> None:
        """A task for a machine came to another one, or nobody is there any more."""
        with self._lock:
            old = self._markers()
            self._found.pop(machine, None)
            self._let_go(old)
        self.doubt()

    def look(self) -> None:
        """Puts a row on every executor that has a slot free, and sees which machine each is on.

        Machines whose slots are taken just now, by a visit as well, stay as they were found before.
        """
        executors = self._now()
        count = max(1, int(self._context._jsc.sc().getExecutorIds().size()))
        marker = self._context.parallelize(range(count), count).cache()
        try:
            rows = marker.mapPartitions(functools.partial(say_where, self._wire)).collect()
        except BaseException:  # the job was cancelled, or an executor died: some rows may be cached all the same
            with self._lock:
                self._let_go([marker])
            raise
        found = {machine: (marker, place) for place, machine in reversed(rows) if machine is not None}
        with self._lock:
            old, new = self._markers(), set(found) - set(self._found)
            if self._open:
                self._found |= found
            self._executors, self._at = executors, time.monotonic()
            self._wait_s = LOOK_S if new or not self._found else min(2 * self._wait_s, LONGEST_LOOK_S)
            self._let_go([*old, marker])

    def close(self) -> None:
        """Lets go of all rows; a look that is still under way keeps none."""
        with self._lock:
            old, self._found, self._open = self._markers(), {}, False
            self._let_go(old)

    def _let_go(self, markers: list[Any]) -> None:
        """Takes out of Spark's storage the rows by which no machine is found any more."""
        kept = {id(each) for each in self._markers()}
        for marker in markers:
            if id(marker) not in kept:
                with contextlib.suppress(Exception):  # the session may have ended
                    marker.unpersist()

    def _markers(self) -> list[Any]:
        return list({id(marker): marker for marker, _ in self._found.values()}.values())

    def _now(self) -> str:
        return str(self._context._jsc.sc().getExecutorIds())
