"""Time as a run knows it: what is waited in, and what goes on beside.

Everything that looks at a clock or waits does it through `Time`. On real machines that is `REAL`; a simulated cluster
brings its own, in which waiting costs nothing and every step takes as long as it is said to.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol

Clock = Callable[[], float]
"""Gives seconds since some moment."""


class Queue(Protocol):
    """As much of `queue.SimpleQueue` as is used: one side puts, another gets, in order."""

    def put(self, item: Any) -> None: ...

    def get(self, *, timeout: float) -> Any: ...

    def get_nowait(self) -> Any: ...

    def empty(self) -> bool: ...


class Beside(Protocol):
    """What goes on beside whoever started it."""

    def start(self) -> None: ...

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool: ...


class Time(Protocol):
    """A clock, and what must know of it."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""

    def wall(self) -> float:
        """The moment as events are stamped with it."""

    def queue(self) -> Queue:
        """Something to hand values over through, whose reader may wait."""

    def beside(self, act: Callable[[], None], name: str) -> Beside:
        """What will run beside its maker, once it is started."""

    def executor(self, name: str, threads: int = 1) -> Executor:
        """Does slow things beside its maker, so many at once."""


class RealTime:
    """The time of this machine."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def queue(self) -> Queue:
        return queue.SimpleQueue()

    def beside(self, act: Callable[[], None], name: str) -> Beside:
        return threading.Thread(target=act, name=name, daemon=True)

    def executor(self, name: str, threads: int = 1) -> Executor:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)


REAL: Time = RealTime()
