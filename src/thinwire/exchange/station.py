"""What the parts of one worker's exchange share: who it is, how it stands to its generation, and how it speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.rounds import Rounds
from thinwire.protocol.clock import Queue, Time
from thinwire.protocol.forms import Body


@dataclass
class Standing:
    """How a worker stands to the newest generation. Only its `Member` changes it."""

    fresh: bool = True
    """Whether the main thread has yet to take a joint state over."""
    needs_state: bool = False
    """Whether the reference has been asked for the joint state, which has not arrived."""
    frozen: bool = True
    """Whether a generation is forming: nothing is merged, and nothing new begins."""
    since: int = 0
    """The newest generation in which this worker held the joint state of all."""
    reference: int = -1
    """The worker whose joint state this generation began with."""
    landed: int = 0
    """The rounds that the reference had landed by then."""


class Tell(Protocol):
    """Sends a message of the newest generation to a worker, which may be this one."""

    def __call__(
        self, peer: int, kind: Callable[..., Body], payload: memoryview | None = None, /, **fields: Any
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Station:
    """What a part of the exchange is given of the worker that it belongs to."""

    identity: Identity
    joint: JointState
    trees: TreeCodec
    time: Time
    rounds: Rounds
    """Knows the generation, its members and their attempts, beside the rounds."""
    signals: Queue
    """What the main thread is to hear."""
    standing: Standing
    tell: Tell
    command: Callable[[Callable[[], None]], None]
    """Has something done on the exchange thread."""
    obey: Callable[[], None]
    """Does what was asked for on other threads, now."""
    wake: Callable[[], None]
    """Has the exchange thread take a turn without a message."""
    tell_not_finite: Callable[[int, str, str, int], None]

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self.identity.worker
