"""The small ports through which network, disk and data enter the engine; each has an in-memory twin in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from torch import Tensor

COORDINATOR = -1
"""The coordinator's number among peers."""
FINAL = "final"
"""Ends the names of what is made once, at the end: means, and the last checkpoint."""

Header = dict[str, Any]
"""A message's JSON part. Its "t" says what it is."""


class Message(NamedTuple):
    """One message: who sent it, its header, and a payload of raw bytes where it has one."""

    sender: int
    header: Header
    payload: memoryview | None = None


class Link(Protocol):
    """Carries messages between one worker and its peers, the coordinator among them."""

    address: str
    """Where peers reach this worker."""

    def connect(self, peers: Mapping[int, str]) -> None:
        """Makes exactly these workers, by number and address, the ones that can be sent to."""

    def send(self, peer: int, header: Header, payload: memoryview | None = None) -> None:
        """Queues a message; never blocks. The payload must not change afterwards."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Messages that have come, after waiting at most so long for the first; returns early when woken."""

    def wake(self) -> None:
        """Makes a `receive` on another thread return now."""

    def close(self) -> None:
        """Sends what is queued, within a deadline, and lets go of the network."""


class Hub(Protocol):
    """The coordinator's end: carries messages to and from workers by number and attempt."""

    address: str

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None: ...

    def receive(self, timeout_s: float) -> list[Message]: ...

    def broken(self) -> list[tuple[int, int]]:
        """Workers and attempts whose connections have ended since the last call."""

    def close(self) -> None: ...


class Wire(Protocol):
    """What a worker needs to make its link."""

    def link(self, worker: int, attempt: int) -> Link: ...


class Rows(NamedTuple):
    """A position in a worker's shard."""

    epoch: int
    batch: int


class Batches(Protocol):
    """A worker's rows, batch by batch."""

    num_rows: int
    batches_per_epoch: int

    def training(self, start: tuple[int, int], epochs: int | None) -> Iterator[Any]:
        """Batches from a position on, in the order that the seed gives; each has `num_rows` and `position`."""

    def validation(self) -> Iterator[Any]:
        """The validation rows, in order."""


class Replica(Protocol):
    """One model that takes steps; its trainable parameters are one flat vector."""

    vector: Tensor
    optimizer_shared: bool

    def gradient(self, batch: Any) -> float:
        """Computes the gradient of a batch's mean loss, and returns that loss."""

    def update(self) -> None:
        """Takes the optimizer step."""


class PartStore(Protocol):
    """Where checkpoint parts go."""

    def write_part(self, checkpoint: str, part: str, tree: object) -> Any: ...


WHOEVER = -1
"""In place of an attempt: whichever is there."""


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


Clock = Callable[[], float]
