"""The placements that users name: ways in which one replica spans several workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.errors import ConfigError
from thinwire.planning import Graph, Machine, Plan, as_placed, plan, pure
from thinwire.rules.placement import Wire
from thinwire.values import check_fields, count_or_auto, number, optional, whole


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Base of all placements.

    Args:
        group_size: workers that one replica spans.
    """

    group_size: int | str = 1
    name: ClassVar[str]
    chooses: ClassVar[bool] = False
    """Whether `group_size` may be "auto": the placement can estimate the time of a step for each size."""

    def __post_init__(self) -> None:
        check_fields(self, "placement", group_size=count_or_auto if self.chooses else whole(1))

    @property
    def shares(self) -> bool:
        """Whether one replica spans several workers, or may do so with "auto"."""
        return self.group_size != 1

    @property
    def size(self) -> int:
        """Workers that one replica spans, once the number is known."""
        assert isinstance(self.group_size, int), "group_size is chosen before a worker starts"
        return self.group_size


@dataclass(frozen=True, kw_only=True)
class Layered(Placement, ABC):
    """Base of placements that place each layer by rows or by features."""

    chooses = True

    @abstractmethod
    def ways(self, graph: Graph, rows: int) -> list[str]:
        """The placement of each layer, for a step with this number of rows in the whole group."""

    def machine(self, wire: Wire | None = None, flops_per_s: float | None = None) -> Machine:
        """The machine that a plan assumes: the placement's own settings, else measurements, else defaults."""
        usual = Machine()
        return Machine(flops_per_s or usual.flops_per_s, None, wire or usual.wire)

    def settled(self, size: int, wire: Wire) -> Layered:
        """This placement with all open settings fixed, so that it places layers the same way everywhere."""
        return replace(self, group_size=size)

    def planned(self, graph: Graph, size: int, rows: int, machine: Machine) -> Plan:
        """The plan of a step in groups of a size."""
        ways = replace(self, group_size=size).ways(graph, rows)
        return as_placed(graph, ways, size, rows, machine)


@dataclass(frozen=True, kw_only=True)
class Whole(Placement):
    """Every worker has a replica of its own."""

    name = "whole"

    def __post_init__(self) -> None:
        if self.group_size != 1:
            raise ConfigError("Whole has one worker for each replica; use Planned, TensorParallel or Pipeline")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Layered):
    """Splits every layer's outputs among the workers of a group, where possible.

    Args:
        group_size: workers that one replica spans; "auto" takes the size with the shortest step.
    """

    name = "tensor_parallel"
    group_size: int | str = 2

    def ways(self, graph: Graph, rows: int) -> list[str]:
        return [p.placement for p in pure(graph, "all model parallel", self.size, rows).placed]


@dataclass(frozen=True, kw_only=True)
class Planned(Layered):
    """Places layers so that a step takes the least time, by SINGA's Algorithm 2.

    Args:
        group_size: workers that one replica spans; "auto" takes the size with the shortest step.
        memory_gb: memory of each worker for parameters, gradients, optimizer and activations; None for no limit.
        link_gbit: rate of the link between workers; by default a gigabit, and with "auto" what the cluster measures.
        latency_ms: latency of a message between workers; by default 0.1, and with "auto" what the cluster measures.
    """

    name = "planned"
    group_size: int | str = 2
    memory_gb: float | None = None
    link_gbit: float | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = {"link_gbit": optional(number(above=0)), "memory_gb": optional(number(above=0))}
        check_fields(self, "placement", **rates, latency_ms=optional(number(least=0)))

    def machine(self, wire: Wire | None = None, flops_per_s: float | None = None) -> Machine:
        found = super().machine(wire, flops_per_s)
        latency_s = found.wire.latency_s if self.latency_ms is None else self.latency_ms / 1e3
        bytes_per_s = found.wire.bytes_per_s if self.link_gbit is None else self.link_gbit * 1e9 / 8
        memory = None if self.memory_gb is None else self.memory_gb * 2**30
        return replace(found, wire=Wire(latency_s, bytes_per_s), memory_bytes=memory)

    def settled(self, size: int, wire: Wire) -> Planned:
        link_gbit = wire.bytes_per_s * 8 / 1e9 if self.link_gbit is None else self.link_gbit
        latency_ms = wire.latency_s * 1e3 if self.latency_ms is None else self.latency_ms
        return replace(self, group_size=size, link_gbit=link_gbit, latency_ms=latency_ms)

    def ways(self, graph: Graph, rows: int) -> list[str]:
        return [p.placement for p in self.planned(graph, self.size, rows, self.machine()).placed]

    def planned(self, graph: Graph, size: int, rows: int, machine: Machine) -> Plan:
        return plan(graph, size, rows, machine)


@dataclass(frozen=True, kw_only=True)
class Pipeline(Placement):
    """Splits the network into consecutive stages, one for each worker of a group, through which the rows pass.

    Args:
        group_size: workers that one replica spans.
        microbatches: pieces into which each worker's rows are split, so that stages work at the same time.
    """

    name = "pipeline"
    group_size: int | str = 2
    microbatches: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "placement", microbatches=whole(1))
