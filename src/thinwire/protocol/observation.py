"""Observations of the engine, beside its events: moments at which an invariant can be checked.

Users' callbacks get events, which are cheap and serialisable. An observer gets the tensors themselves, on the thread
that owns them, and must neither change nor keep them. The schedules of thinwire-lab check their invariants this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Opened(NamedTuple):
    """The coordinator of a run starts; a run that resumes from a checkpoint opens again."""


class Heard(NamedTuple):
    """The coordinator has received a worker's progress."""

    worker: int
    rows: int
    """Rows after which a replacement of the worker would continue."""


class SeatLost(NamedTuple):
    """The coordinator has given up a worker's seat."""

    worker: int


class GroupLeft(NamedTuple):
    """A worker has noticed that its placement group is broken."""


class Synchronised(NamedTuple):
    """A worker has entered a generation with the joint state that all members hold."""

    generation: int
    num_members: int
    landed: int
    model: Tensor | None
    """None where workers hold no copy of the joint model."""


class StateLoaded(NamedTuple):
    """A worker's joint state was replaced by a peer's or a checkpoint's."""


class ReplicaEntered(NamedTuple):
    """A worker's main thread has entered a generation; the joint model now includes a replica that trained alone."""

    generation: int
    alone: bool


class Merged(NamedTuple):
    """A round was merged into a worker's joint state."""

    generation: int
    landed: int
    reply: Tensor
    model: Tensor | None
    kept: tuple[Tensor, ...] = ()
    """State of a joint optimizer beside the model; empty without such an optimizer."""


class Concluded(NamedTuple):
    """A worker holds the final model."""

    model: Tensor
    settled: bool
    """Whether no other worker can change the model any more; False under asynchronous strategies."""


Observation = Opened | Heard | SeatLost | GroupLeft | Synchronised | StateLoaded | ReplicaEntered | Merged | Concluded
Observer = Callable[[Observation], None]


def unobserved(observation: Observation) -> None:
    """The observer of runs that are not observed: does nothing."""
