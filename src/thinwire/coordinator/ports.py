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
    """A worker that has ended."""

    worker: int
    attempt: int
    reason: str


class Workforce(Protocol):
    """The cluster's side of a run: who has died, and who takes their place."""

    revives: bool
    """Whether a worker that was given up, and is heard again, may take its own place back."""

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call."""

    def replace(self, worker: int, attempt: int) -> bool:
        """Starts a new attempt of a worker; False when there will be none."""

    def stop(self) -> None:
        """Ends what still runs, within a deadline."""


class Commit(Protocol):
    """Makes the parts that workers wrote a checkpoint, beside its caller; its size in bytes comes of it."""

    def __call__(self, name: str, step: int, parts: list[dict[str, Any]], meta: dict[str, Any]) -> Future[int]: ...
