"""The exchange as a worker's stepping thread sees it: four narrow ports, which `Peer` is behind.

A collaborator of the worker asks for the port that it needs, not for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from thinwire.exchange.notes import Note
from thinwire.exchange.signals import Signal
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.protocol.clock import Time
from thinwire.protocol.forms import Body
from thinwire.transport.ports import Traffic

Tree = dict[str, object]
"""A joint state, or another tree of plain values and tensors, as checkpoints hold it."""


class Launching(Protocol):
    """This worker's own contributions. `next_round` and `claim` are safe on any thread."""

    @property
    def next_round(self) -> int:
        """The number of the round that would be claimed next."""

    @property
    def follows_until(self) -> float:
        """The round before which this worker takes part without contributing, as the exchange thread has it."""

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round that this worker is to launch next."""

    def launch(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: Note
    ) -> None:
        """Contributes to a claimed round: a snapshot to be taken, a tensor that no longer changes, or nothing."""

    def follow(self, until: float, *, in_step: bool = False) -> None:
        """Takes part in rounds before this one without contributing; in step with a group, in no other."""


class Feeding(Protocol):
    """Contributions that go out tuple by tuple, as their values are made."""

    @property
    def tuples(self) -> Sequence[Fragment]:
        """The pieces in which a contribution goes to servers; none on a mesh."""

    def feed(self, round: int, keys: list[int], absent: frozenset[int] = frozenset()) -> None:
        """Tuples of a launched round whose values no longer change, and parameters that have no gradient in any."""

    def withhold(self, round: int) -> None:
        """What a launched round has yet to be fed counts for nothing."""

    def abandon(self, round: int) -> None:
        """Gives up a launched round whose values were never made."""


class RoundsPort(Launching, Feeding, Protocol):
    """Training's rounds."""


class PublicationsPort(Protocol):
    """Means and looks outside of training's rounds."""

    def average(self, key: str, values: Tensor, weight: float, note: Note) -> None:
        """Asks for a one-off float32 mean over all workers, under a key that all of them use."""

    def view(self, key: str) -> None:
        """Asks for the joint model as its servers have it, under a key; it comes as a mean does."""

    def announce(self, note: Note) -> None:
        """Tells the first worker how far this one is, or what it wants to publish, outside of a round."""


class StatePort(Protocol):
    """The joint state, given to peers and taken over from them."""

    def put(self, generation: int, model: Tensor | None) -> None:
        """What a generation goes on with, where this worker is its reference: the joint state here, or this model."""

    def estrange(self) -> None:
        """What the replica has is not what the joint state says: it has to be handed over anew."""

    def donate(self, peer: int, tree: Tree, generation: int) -> None:
        """Sends the joint state to a peer that asked for it in a generation, unless that is over."""

    def expects(self, fits: Callable[[Tree], bool]) -> None:
        """Has a joint state that a peer gives looked at before it is taken over; before `start`, for any thread."""

    def encode(self, tree: object) -> bytes:
        """A tree as bytes, in the form of checkpoints."""

    def residuals(self) -> list[Tensor] | None:
        """What compression has left unsent, for a checkpoint; only while no round is open."""

    def restore_residuals(self, values: list[Tensor] | None) -> None:
        """Puts back what a checkpoint holds; before `start`."""


class ReportsPort(Protocol):
    """What this worker tells the coordinator, and what the exchange tells the stepping thread."""

    time: Time

    @property
    def quiet(self) -> bool:
        """Whether no signal waits; cheap enough for every step."""

    def signals(self, timeout_s: float = 0.0) -> Iterator[Signal]:
        """Signals that have come, after waiting at most `timeout_s` for the first."""

    def start(self, digest: str) -> None:
        """Joins the run; `digest` tells whether this replica starts equal to the others."""

    def report(self, body: Body, payload: memoryview | None = None) -> None:
        """Tells the coordinator something."""

    def progress(self, values: Note) -> None:
        """What the next heartbeat says."""

    def flush(self) -> None:
        """Sends a heartbeat with the newest progress now, ahead of what is reported next."""

    def sent_aside(self, size_bytes: int) -> None:
        """What this worker has sent beside the exchange, in all."""

    def traffic(self) -> Traffic | None:
        """What sockets have counted; None where there are none."""


class Exchange(RoundsPort, PublicationsPort, StatePort, ReportsPort, Protocol):
    """All of it, for the worker itself."""
