"""An iterator that a thread runs ahead of its consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar, final

T = TypeVar("T")

_JOIN_TIMEOUT_S = 5.0


@final
class Ahead(Generic[T]):
    """Runs an iterator in a thread, up to `depth` items ahead of the consumer.

    An exception in the thread is raised in the consumer, with the thread's traceback, after the items before it.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._depth = depth
        self._closed = self._done = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), name="thinwire-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._done or self._closed)
                if self._closed:
                    return
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._changed.notify_all()
            yield item
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread after its present item. May be called repeatedly, from any thread."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            # A transform that hangs must not block the end of the run: the thread is a daemon.
            self._thread.join(_JOIN_TIMEOUT_S)

    def _has_room(self) -> bool:
        """Waits until the queue has room for another item; False once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed

    def _run(self, items: Iterator[T]) -> None:
        try:
            while self._has_room():
                item = next(items)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()
