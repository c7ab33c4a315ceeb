"""One replica on several workers: the share of each worker, and the steps that they take together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.placement.build import refuse_unreadable
from thinwire.placement.crew import Crew
from thinwire.placement.kinds import Layered, Pipeline, Placement, Planned, TensorParallel, Whole
from thinwire.placement.pipeline import StageReplica
from thinwire.placement.portions import assembled
from thinwire.placement.replica import GroupReplica, ShardedReplica, stand_in
from thinwire.replicas import TrainSpec

__all__ = [
    "Crew",
    "GroupReplica",
    "Layered",
    "Pipeline",
    "Placement",
    "Planned",
    "TensorParallel",
    "Whole",
    "assembled",
    "between_processes",
    "part_of",
    "refuse_unreadable",
    "stand_in",
]


def between_processes(worker: int, attempt: int, size: int, host: str, *, wire: Any = None) -> Crew:
    """The end of a worker's group in its own process: with the keys of the run's wire, or through gloo at a host."""
    if wire is None:
        return Crew(worker % size, size, host)
    from thinwire.placement.sealed import Sealed  # imported here: simulations need no sockets

    return Crew(worker % size, size, carrier=Sealed(worker % size, size, wire, worker, attempt))


def part_of(
    placement: Placement,
    model: nn.Module | Callable[[], nn.Module],
    spec: TrainSpec,
    worker: int,
    *,
    crew: Crew,
    examples: Sequence[Tensor],
    rows: int,
) -> GroupReplica:
    """A member's part of a replica, for inputs like the examples and `rows` rows of each member in a step."""
    if isinstance(placement, Pipeline):
        return StageReplica(model, spec, worker, placement=placement, crew=crew, examples=examples, rows=rows)
    assert isinstance(placement, Layered)
    return ShardedReplica(model, spec, worker, placement=placement, crew=crew, examples=examples, rows=rows)
