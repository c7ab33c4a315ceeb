"""The time of a run: clocks, queues with timeouts, threads and executors.

Code that reads a clock or waits does so through `Time`. On real machines that is `REAL`. A simulated cluster has a time
of its own, in which waiting costs nothing and each step takes the duration that the simulation sets.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

Clock = Callable[[], float]
"""Returns the seconds since a fixed moment."""


class Queue(Protocol):
    """The part of `queue.SimpleQueue` that thinwire uses: one side puts, the other gets, in order."""

    def put(self, item: Any) -> None: ...

    def get(self, *, timeout: float) -> Any: ...

    def get_nowait(self) -> Any: ...

    def empty(self) -> bool: ...


class Beside(Protocol):
    """The part of `threading.Thread` that thinwire uses."""

    def start(self) -> None: ...

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool: ...


class Time(Protocol):
    """A clock, and the things that wait by it."""

    def now(self) -> float:
        """Seconds since a fixed moment; never decreases."""

    def wall(self) -> float:
        """The time of day, with which events are stamped."""

    def queue(self) -> Queue:
        """A queue whose reader may wait."""

    def beside(self, act: Callable[[], None], name: str) -> Beside:
        """A thread that runs `act` once it is started."""

    def executor(self, name: str, threads: int = 1) -> Executor:
        """An executor for slow work, with this number of threads."""


class RealTime:
    """The real time of this machine."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def queue(self) -> Queue:
        return queue.SimpleQueue()

    def beside(self, act: Callable[[], None], name: str) -> Beside:
        return threading.Thread(target=act, name=name, daemon=True)

    def executor(self, name: str, threads: int = 1) -> Executor:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)


REAL: Time = RealTime()
