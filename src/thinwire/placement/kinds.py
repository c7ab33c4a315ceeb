"""How one replica spans several workers: the placements that users name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.planning import Graph, Machine, plan
from thinwire.planning.planner import pure
from thinwire.rules.placement import Wire
from thinwire.values import check_fields, number, optional, whole


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Base of all placements.

    Args:
        group_size: workers that one replica spans.
    """

    group_size: int = 1
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self, "placement", group_size=whole(1))


@dataclass(frozen=True, kw_only=True)
class Layered(Placement, ABC):
    """Base of those that place each layer by rows or by features."""

    @abstractmethod
    def ways(self, graph: Graph, rows: int) -> list[str]:
        """How each layer is placed, for so many rows of the whole group in a step."""


@dataclass(frozen=True, kw_only=True)
class Whole(Placement):
    """Every worker has a replica of its own."""

    name = "whole"

    def __post_init__(self) -> None:
        if self.group_size != 1:
            raise ConfigError("Whole has one worker for each replica; use Planned, TensorParallel or Pipeline")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Layered):
    """Every layer's outputs are shared out among the workers of a group, as far as they can be."""

    name = "tensor_parallel"
    group_size: int = 2

    def ways(self, graph: Graph, rows: int) -> list[str]:
        return [p.placement for p in pure(graph, "all model parallel", self.group_size, rows).placed]


@dataclass(frozen=True, kw_only=True)
class Planned(Layered):
    """Layers are placed so that a step takes least time, as SINGA's Algorithm 2 has it.

    Args:
        group_size: workers that one replica spans.
        memory_gb: of each worker, for parameters, gradients, optimizer and activations; None for no limit.
        link_gbit: rate of the link between workers.
        latency_ms: of a message between workers.
    """

    name = "planned"
    group_size: int = 2
    memory_gb: float | None = None
    link_gbit: float = 1.0
    latency_ms: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = {"link_gbit": number(above=0), "memory_gb": optional(number(above=0))}
        check_fields(self, "placement", **rates, latency_ms=number(least=0))

    def ways(self, graph: Graph, rows: int) -> list[str]:
        memory = None if self.memory_gb is None else self.memory_gb * 2**30
        wire = Wire(self.latency_ms / 1e3, self.link_gbit * 1e9 / 8)
        found = plan(graph, self.group_size, rows, Machine(memory_bytes=memory, wire=wire))
        return [p.placement for p in found.placed]


@dataclass(frozen=True, kw_only=True)
class Pipeline(Placement):
    """Layers are shared out one after the other: each worker of a group has a stage, and rows pass through all.

    Args:
        group_size: workers that one replica spans.
        microbatches: pieces into which each worker's rows are cut, so that stages work at the same time.
    """

    name = "pipeline"
    group_size: int = 2
    microbatches: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "placement", microbatches=whole(1))
