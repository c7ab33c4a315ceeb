"""How one replica spans several workers: the placements that users name."""

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
    """Whether `group_size` may be "auto": it can tell what a step takes in groups of each size."""

    def __post_init__(self) -> None:
        check_fields(self, "placement", group_size=count_or_auto if self.chooses else whole(1))

    @property
    def shares(self) -> bool:
        """Whether one replica spans several workers, or may come to."""
        return self.group_size != 1

    @property
    def size(self) -> int:
        """Workers that one replica spans, once that is known."""
        assert isinstance(self.group_size, int), "it is chosen before a worker starts"
        return self.group_size


@dataclass(frozen=True, kw_only=True)
class Layered(Placement, ABC):
    """Base of those that place each layer by rows or by features."""

    chooses = True

    @abstractmethod
    def ways(self, graph: Graph, rows: int) -> list[str]:
        """How each layer is placed, for so many rows of the whole group in a step."""

    def machine(self, wire: Wire | None = None, flops_per_s: float | None = None) -> Machine:
        """What a plan for it counts with, as far as its own settings say; the rest is what was measured, or usual."""
        usual = Machine()
        return Machine(flops_per_s or usual.flops_per_s, None, wire or usual.wire)

    def settled(self, size: int, wire: Wire) -> Layered:
        """The same with all that it leaves open told: it places alike wherever it is asked."""
        return replace(self, group_size=size)

    def planned(self, graph: Graph, size: int, rows: int, machine: Machine) -> Plan:
        """What a step takes in groups of a size."""
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
    """Every layer's outputs are shared out among the workers of a group, as far as they can be.

    Args:
        group_size: workers that one replica spans; "auto" takes the size in which a step takes least time.
    """

    name = "tensor_parallel"
    group_size: int | str = 2

    def ways(self, graph: Graph, rows: int) -> list[str]:
        return [p.placement for p in pure(graph, "all model parallel", self.size, rows).placed]


@dataclass(frozen=True, kw_only=True)
class Planned(Layered):
    """Layers are placed so that a step takes least time, as SINGA's Algorithm 2 has it.

    Args:
        group_size: workers that one replica spans; "auto" takes the size in which a step takes least time.
        memory_gb: of each worker, for parameters, gradients, optimizer and activations; None for no limit.
        link_gbit: rate of the link between workers; a gigabit unless said, and with "auto" what the cluster measures.
        latency_ms: of a message between workers; 0.1 unless said, and with "auto" what the cluster measures.
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
    """Layers are shared out one after the other: each worker of a group has a stage, and rows pass through all.

    Args:
        group_size: workers that one replica spans.
        microbatches: pieces into which each worker's rows are cut, so that stages work at the same time.
    """

    name = "pipeline"
    group_size: int | str = 2
    microbatches: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "placement", microbatches=whole(1))
