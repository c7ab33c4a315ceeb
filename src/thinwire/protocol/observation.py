"""What the engine shows an observer beside its events: moments at which an invariant can be checked.

Users' callbacks get events, which are cheap and serialisable. An observer gets the tensors themselves, on the thread
that holds them, and must neither change nor keep them. The schedules of thinwire-lab check their invariants this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Opened(NamedTuple):
    """The coordinator of a run starts; a run that goes on from a checkpoint opens again."""


class Heard(NamedTuple):
    """The coordinator took in how far a worker is."""

    worker: int
    rows: int
    """A replacement would continue after so many rows."""


class SeatLost(NamedTuple):
    """The coordinator gave up a worker."""

    worker: int


class GroupLeft(NamedTuple):
    """A worker noticed that its placement group is broken."""


class Synchronised(NamedTuple):
    """A worker entered a generation with the joint state that all members hold."""

    generation: int
    num_members: int
    landed: int
    model: Tensor | None
    """None where the joint model is not replicated on workers."""


class StateLoaded(NamedTuple):
    """A worker's joint state was replaced by that of a peer or of a checkpoint."""


class ReplicaEntered(NamedTuple):
    """A worker's main thread has entered a generation; a replica that trained alone is in the joint model now."""

    generation: int
    alone: bool


class Merged(NamedTuple):
    """A round was merged into a worker's joint state."""

    generation: int
    landed: int
    reply: Tensor
    model: Tensor | None
    kept: tuple[Tensor, ...] = ()
    """What a joint optimizer keeps beside the model, where there is one."""


class Concluded(NamedTuple):
    """A worker knows the final model."""

    model: Tensor
    settled: bool
    """Whether no other worker can change it any more; not so under asynchronous strategies."""


Observation = Opened | Heard | SeatLost | GroupLeft | Synchronised | StateLoaded | ReplicaEntered | Merged | Concluded
Observer = Callable[[Observation], None]


def unobserved(observation: Observation) -> None:
    """The observer of every run that nobody observes."""
