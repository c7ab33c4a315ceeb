"""What the parts of one worker's exchange share: who it is, how it stands to its generation, and how it speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.notes import Note
from thinwire.exchange.round import Launch
from thinwire.exchange.rounds import Rounds
from thinwire.exchange.slices import Send, TellNotFinite
from thinwire.protocol.clock import Queue, Time
from thinwire.protocol.forms import Body
from thinwire.protocol.observation import Synchronised


@dataclass
class Standing:
    """How a worker stands to the newest generation. `Generations` and `StateTransfer` change it."""

    fresh: bool = True
    """Whether the main thread has yet to take a joint state over."""
    digest: str = ""
    """What the replica began with: equal where workers began equal."""
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
    published: int = 0
    """The last publication that was over when the joint state was copied for this worker."""

    def estrange(self) -> None:
        """What the main thread has is no longer what the joint state says: it has to be given it anew."""
        self.fresh = True


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
    codec_name: str
    """The codec of rounds whose setting names none."""
    trees: TreeCodec
    time: Time
    rounds: Rounds
    """Knows the generation, its members and their attempts, beside the rounds."""
    signals: Queue
    """What the main thread is to hear."""
    standing: Standing
    send: Send
    command: Callable[[Callable[[], None]], None]
    """Has something done on the exchange thread."""
    obey: Callable[[], None]
    """Does what was asked for on other threads, now."""
    wake: Callable[[], None]
    """Has the exchange thread take a turn without a message."""
    note: Callable[[], Note]
    """What this worker says beside a part that contributes nothing."""
    tell_not_finite: TellNotFinite

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self.identity.worker

    def tell(self, peer: int, kind: Callable[..., Body], payload: memoryview | None = None, /, **fields: Any) -> None:
        """Sends a message of this generation to a worker."""
        stamp = {"generation": self.rounds.generation, "attempt": self.identity.attempt}
        self.send(peer, kind(**stamp | fields), payload)

    def launch(self, own: Launch) -> bool:
        """Launches this worker's part in a round, or keeps it until the generation under way has formed."""
        return self.rounds.hold(own) if self.standing.frozen else self.rounds.launch(own)

    def synchronised(self) -> None:
        """Tells the observer that this worker holds the joint state of its generation."""
        generation, num_members = self.rounds.generation, len(self.rounds.members)
        model = self.joint.model if self.joint.strategy.timing != "async" else None
        self.joint.observe(Synchronised(generation, num_members, self.joint.landed, model))
