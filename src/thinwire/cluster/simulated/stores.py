"""Executors in virtual time: immediate, or one task after the other with a fixed duration."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as LateError
from typing import Any, Generic, Protocol, TypeVar

from thinwire.protocol.clock import Beside

Fiber = TypeVar("Fiber")


class Fibers(Protocol[Fiber]):
    """The part of virtual time that a store needs."""

    @property
    def current(self) -> Fiber:
        """The fiber that runs now."""

    def now(self) -> float: ...

    def beside(self, act: Callable[[], None], name: str) -> Beside: ...

    def work(self, seconds: float) -> None: ...

    def park(self, timeout: float | None = None) -> None: ...

    def wake(self, fiber: Fiber) -> None: ...


class AtOnce(Executor):
    """Runs each task immediately, in no virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class InTurn(Executor, Generic[Fiber]):
    """Runs tasks one after the other in `seconds` each, on a fiber that ends with the fiber that submitted them."""

    def __init__(self, time: Fibers[Fiber], name: str, seconds: float) -> None:
        self._time, self._name, self._seconds = time, name, seconds
        self._given: deque[tuple[_Awaited[Fiber], Callable[[], Any]]] = deque()
        self._fiber: Beside | None = None
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        awaited = _Awaited(self._time)
        self._given.append((awaited, lambda: fn(*args, **kwargs)))
        if self._fiber is None or not self._fiber.is_alive():
            self._fiber = self._time.beside(self._work, self._name)
            self._fiber.start()
        return awaited

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        for awaited, _ in list(self._given) if cancel_futures else ():
            awaited.cancel()
        if wait and self._fiber is not None:
            while self._fiber.is_alive():
                self._fiber.join(self._seconds)

    def _work(self) -> None:
        while self._given:
            awaited, act = self._given.popleft()
            if not awaited.set_running_or_notify_cancel():
                continue
            self._time.work(self._seconds)
            try:
                awaited.set_result(act())
            except Exception as error:
                awaited.set_exception(error)
            for fiber in awaited.waiting:
                self._time.wake(fiber)


class _Awaited(Future[Any], Generic[Fiber]):
    """A future that is waited for in virtual time."""

    def __init__(self, time: Fibers[Fiber]) -> None:
        super().__init__()
        self._time = time
        self.waiting: list[Fiber] = []

    def result(self, timeout: float | None = None) -> Any:
        until = None if timeout is None else self._time.now() + timeout
        while not self.done():
            left = None if until is None else until - self._time.now()
            if left is not None and left <= 0:
                raise LateError
            self.waiting.append(self._time.current)
            self._time.park(left)
        return super().result(0)
