"""What the stepping thread has the exchange thread do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class Commands:
    """Calls for the exchange thread, in order. All but `obey` is safe on any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._wake = wake

    def post(self, act: Callable[[], object]) -> None:
        """Has something done on the exchange thread, soon."""
        self._waiting.append(act)
        self._wake()

    def posting(self, act: Callable[P, object]) -> Callable[P, None]:
        """A function that has this one called on the exchange thread, soon, and does not wait for it."""

        def post(*args: P.args, **named: P.kwargs) -> None:
            self.post(lambda: act(*args, **named))

        return post

    def obey(self) -> None:
        """Does what was posted."""
        while self._waiting:
            self._waiting.popleft()()
