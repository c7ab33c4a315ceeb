"""The ports through which the coordinator reaches the cluster and the checkpoint store."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from thinwire import events
from thinwire.protocol.forms import Body


class Send(Protocol):
    """Sends a message to an attempt of a worker."""

    def __call__(self, worker: int, attempt: int, body: Body) -> None: ...


class Emit(Protocol):
    """Puts an event into the run's log."""

    def __call__(self, event: events.Event) -> None: ...


class Exit(NamedTuple):
    """A worker's process that has ended."""

    worker: int
    attempt: int
    reason: str


class Workforce(Protocol):
    """The cluster's side of a run: which workers have ended, and replacements for them."""

    revives: bool
    """Whether a worker whose seat was given up may take it back when it is heard again."""

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call."""

    def replace(self, worker: int, attempt: int) -> bool:
        """Starts a new attempt of a worker; False where no replacement is possible."""

    def stop(self) -> None:
        """Ends the processes that still run, within a deadline."""


class Commit(Protocol):
    """Commits a checkpoint from the parts that workers wrote, on another thread; the result is its size in bytes."""

    def __call__(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> Future[int]: ...
