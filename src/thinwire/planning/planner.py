"""SINGA's choice of parallelism for each layer (Algorithm 2), by elimination instead of enumeration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from thinwire.errors import ConfigError
from thinwire.planning.graph import Graph, Layer
from thinwire.planning.solver import cheapest
from thinwire.rules.placement import (
    FLOAT,
    NOTHING,
    Cost,
    Way,
    Wire,
    redistributed,
    summed_gradients,
    summed_output,
)

WAYS: dict[str, tuple[Way, Way]] = {
    "data": ("rows", "rows"),
    "column": ("full", "features"),
    "row": ("features", "rows"),
    "rows": ("rows", "rows"),
    "features": ("features", "features"),
}
"""By placement, the layout that a layer's input must have on the group, and the layout of its output."""


PURE = {"all data parallel": ("data", "rows"), "all model parallel": ("column", "features")}
"""Reference plans: the placements that each prefers wherever they are possible."""


@dataclass(frozen=True)
class Machine:
    """The properties of one worker that a plan uses."""

    flops_per_s: float = 5e10
    memory_bytes: float | None = None
    wire: Wire = field(default_factory=Wire)
    optimizer_floats: int = 1
    """Floats of optimizer state for each parameter."""


class Connection(NamedTuple):
    """A redistribution of activations from the layout that one layer gives to the layout that another needs."""

    source: int
    """Index in the graph of the layer before it."""
    target: int
    before: Way
    """Layout of the incoming activations."""
    after: Way
    """Layout of the outgoing activations."""

    @property
    def what(self) -> str:
        """Its operation in the forward pass, and that for gradients in the backward pass."""
        return OPERATIONS[self.before, self.after]


OPERATIONS: dict[tuple[Way, Way], str] = {
    ("rows", "full"): "all-gather, reduce-scatter back",
    ("features", "full"): "all-gather, reduce-scatter back",
    ("rows", "features"): "all-to-all, and back",
    ("features", "rows"): "all-to-all, and back",
}


class Placed(NamedTuple):
    """A layer with its placement and costs."""

    layer: Layer
    placement: str
    cost: Cost
    """What a worker sends for the layer in a step, including redistributions of its inputs."""
    seconds: float
    """Seconds of communication."""
    compute_s: float
    memory_bytes: float


Planner = Callable[[Graph, int, int, "Machine"], "Plan"]


@dataclass(frozen=True)
class Plan:
    """A placement of every layer, on a group of workers that trains one replica."""

    placed: tuple[Placed, ...]
    group: int
    rows: int
    """Rows of the whole group in a step."""
    machine: Machine
    alternatives: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Of the reference plans that fit into memory: seconds of a step, bytes sent, and memory of a worker."""
    too_large: Mapping[str, float] = field(default_factory=dict)
    """Of the reference plans that do not fit into memory: bytes on a worker."""
    connections: tuple[tuple[Connection, Cost, float], ...] = ()
    """The redistributions between layers, with what a worker sends for each and the seconds of that."""
    between: Cost = NOTHING
    """What a worker sends in a step to workers of other replicas, if the plan includes the exchange."""
    between_s: float = 0.0
    """Seconds of a step in which a worker waits for that exchange."""

    @property
    def sent_bytes(self) -> float:
        return sum(p.cost.sent_bytes for p in self.placed)

    @property
    def exchange_s(self) -> float:
        return sum(p.seconds for p in self.placed)

    @property
    def compute_s(self) -> float:
        return sum(p.compute_s for p in self.placed)

    @property
    def step_s(self) -> float:
        """Seconds of a step within a group, without overlap of computation and communication."""
        return self.compute_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Seconds of a step: computation, and communication within and between groups."""
        return self.step_s + self.between_s

    @property
    def memory_bytes(self) -> float:
        return sum(p.memory_bytes for p in self.placed)

    @property
    def alone_s(self) -> float:
        """Seconds that a single worker would need for the same rows, if its memory sufficed."""
        return sum(compute_of(p.layer, "data", 1, self.rows, self.machine) for p in self.placed)


def choices(layer: Layer, group: int) -> tuple[str, ...]:
    """The possible placements of a layer on a group."""
    many, column = group > 1 and layer.outputs >= group, [] if layer.pinned else ["column"]
    if layer.kind == "split":
        return ("data", *(column if many else []), *(["row"] if many and layer.units_in >= group else []))
    return ("rows", "features") if layer.kind == "channels" and many and not layer.pinned else ("rows",)


def cost_of(layer: Layer, placement: str, group: int, rows: int) -> Cost:
    """What a worker sends in a step for the layer itself."""
    if placement == "row":
        return _both(summed_output(layer.features, rows, group), summed_gradients(layer.whole, group))
    if placement == "column" and layer.gathered[1]:
        floats, count = layer.gathered
        each = redistributed("features", "full", floats, rows, group)
        return Cost(each.sent_bytes, each.messages * count)
    if placement in ("data", "rows") and layer.parameters:
        return summed_gradients(layer.parameters, group)
    return NOTHING


def border(source: Layer, target: Layer, given: str, wanted: str, group: int, rows: int) -> Cost:
    """What a worker sends to redistribute a layer's output for the next layer; an input has no gradient."""
    cost = NOTHING
    for before, after in redistributions(source, target, given, wanted):
        cost = _both(cost, _redistribution_cost(source, before, after, group, rows))
    return cost


def _redistribution_cost(source: Layer, before: Way, after: Way, group: int, rows: int) -> Cost:
    cost = redistributed(before, after, source.features, rows, group)
    return Cost(cost.sent_bytes / 2, cost.messages / 2) if source.kind == "input" else cost


def connections(graph: Graph, ways: Sequence[str]) -> list[Connection]:
    """The redistributions between layers that are placed in these ways, in the order of the graph."""
    return [
        Connection(source, target, before, after)
        for source, target in graph.edges
        for before, after in redistributions(graph.layers[source], graph.layers[target], ways[source], ways[target])
    ]


def redistributions(source: Layer, target: Layer, given: str, wanted: str) -> list[tuple[Way, Way]]:
    """The redistributions between two layers, in order: pairs of layouts before and after."""
    before, after = WAYS[given][1], WAYS[wanted][0]
    if before == after == "features" and source.feature_dim != target.wanted_dim:
        return [("features", "rows"), ("rows", "features")]
    return [] if before == after else [(before, after)]


def _both(one: Cost, other: Cost) -> Cost:
    return Cost(one.sent_bytes + other.sent_bytes, one.messages + other.messages)


def memory_of(layer: Layer, placement: str, group: int, rows: int, machine: Machine) -> float:
    """Bytes on a worker: parameters, gradients and optimizer state; the output; and the input where it is gathered."""
    share = 1 if placement in ("data", "rows") else group
    each = FLOAT * layer.parameters  # optimizer state is split even for parameters that each worker holds in full
    parameters = each * (2 / share + machine.optimizer_floats / group)
    gathered = FLOAT * layer.inputs * rows if placement == "column" and group > 1 else 0.0
    return parameters + FLOAT * layer.features * rows / group + gathered


def compute_of(layer: Layer, placement: str, group: int, rows: int, machine: Machine) -> float:
    """Seconds that a worker computes on a layer in a step: measured, or else estimated from operations."""
    each = layer.seconds if layer.seconds is not None else layer.flops / machine.flops_per_s
    if placement in ("column", "row") and layer.shared_seconds is not None:
        each = layer.shared_seconds * group
    return each * rows / group


def plan(graph: Graph, group: int, rows: int, machine: Machine | None = None) -> Plan:
    """The plan with the shortest step, computation and communication, among those that fit into the workers' memory.

    Args:
        graph: the network.
        group: workers that train one replica together.
        rows: rows of the whole group in a step.
        machine: properties of each worker and of the link between workers.
    """
    machine = machine or Machine()
    if group < 1 or rows < group:
        raise ConfigError(
            f"a group of {group} workers cannot share {rows} rows a step; give each worker at least one row"
        )
    options = [choices(layer, group) for layer in graph.layers]
    chosen = _chosen(graph, options, group, rows, machine)
    if chosen is None:
        least = sum(
            min(memory_of(layer, way, group, rows, machine) for way in ways)
            for layer, ways in zip(graph.layers, options, strict=True)
        )
        assert machine.memory_bytes is not None
        raise ConfigError(
            f"no placement on {group} workers fits into {machine.memory_bytes / 2**30:.2f} GiB each: the most frugal "
            f"one needs {least / 2**30:.2f} GiB; use a larger group, fewer rows a step, or more memory"
        )
    ways = [each[c] for each, c in zip(options, chosen, strict=True)]
    best = as_placed(graph, ways, group, rows, machine)
    fits: dict[str, tuple[float, float, float]] = {}
    too_large: dict[str, float] = {}
    for name in PURE if group > 1 else ():
        other = pure(graph, name, group, rows, machine)
        if machine.memory_bytes is not None and other.memory_bytes > machine.memory_bytes:
            too_large[name] = other.memory_bytes
            continue
        fits[name] = (other.step_s, other.sent_bytes, other.memory_bytes)
        if other.step_s < best.step_s:  # for a large graph with a limit the solver examines only a sample
            best = other
    return replace(best, alternatives=fits, too_large=too_large)


@dataclass(frozen=True)
class Between:
    """How often replicas exchange.

    Args:
        period: steps between two exchanges of a parameter.
        waits: whether steps wait for the whole exchange; otherwise only for the part that takes longer than the steps.
    """

    period: float = 1.0
    waits: bool = True


def with_exchange(found: Plan, graph: Graph, workers: int, between: Between) -> Plan:
    """The plan with the exchange between replicas: each member exchanges its part within its lane."""
    replicas = workers // found.group
    if replicas == 1:
        return found
    whole = summed_gradients(graph.parameters / found.group, replicas)
    cost = Cost(whole.sent_bytes / between.period, whole.messages / between.period)
    seconds = found.machine.wire.seconds(*cost)
    return replace(found, between=cost, between_s=seconds if between.waits else max(0.0, seconds - found.step_s))


def sizes_of(
    graph: Graph, workers: int, batch: int, *, machine: Machine, between: Between, planned: Planner | None = None
) -> list[Plan]:
    """A plan for each possible group size for which a replica fits into memory, from the smallest size on.

    Every worker brings its own batch, so a step has the same rows at each size: the plan with the least `total_s` is
    best.

    Args:
        graph: the network.
        workers: workers of the cluster.
        batch: rows of a worker's step.
        machine: properties of each worker and of the link between workers.
        between: how often replicas exchange.
        planned: the function that places layers in groups of a size; by default `plan`.
    """
    found, refusal = [], None
    for size in (size for size in range(1, workers + 1) if workers % size == 0):
        try:
            each = (planned or plan)(graph, size, batch * size, machine)
        except ConfigError as error:
            refusal = error
            continue
        if machine.memory_bytes is None or each.memory_bytes <= machine.memory_bytes:
            found.append(with_exchange(each, graph, workers, between))
    if not found and refusal is not None:
        raise refusal
    return found


def pure(graph: Graph, name: str, group: int, rows: int, machine: Machine | None = None) -> Plan:
    """The reference plan that places every layer in the same way, where possible."""
    machine = machine or Machine()
    options = [choices(layer, group) for layer in graph.layers]
    ways = [next((p for p in PURE[name] if p in each), each[0]) for each in options]
    return as_placed(graph, ways, group, rows, machine)


def _chosen(
    graph: Graph, options: list[tuple[str, ...]], group: int, rows: int, machine: Machine
) -> tuple[int, ...] | None:
    wire = machine.wire
    costs = []
    for layer, ways in zip(graph.layers, options, strict=True):
        computing = [compute_of(layer, way, group, rows, machine) for way in ways]
        least = min(computing)  # compares only additional time, so that rounding does not decide
        costs.append(
            [
                wire.seconds(*cost_of(layer, way, group, rows)) + (seconds - least)
                for way, seconds in zip(ways, computing, strict=True)
            ]
        )
    edges: dict[tuple[int, int], Any] = {}
    for before, after in graph.edges:
        ends = graph.layers[before], graph.layers[after]
        edges[before, after] = [
            [wire.seconds(*border(*ends, given, wanted, group, rows)) for wanted in options[after]]
            for given in options[before]
        ]
    memory = [
        [memory_of(layer, way, group, rows, machine) for way in ways]
        for layer, ways in zip(graph.layers, options, strict=True)
    ]
    return cheapest(costs, edges, memory, machine.memory_bytes)


def as_placed(graph: Graph, ways: Sequence[str], group: int, rows: int, machine: Machine) -> Plan:
    """The plan with the given placements."""
    found, borders = [], []
    inwards: list[list[Cost]] = [[] for _ in graph.layers]
    for each in connections(graph, ways):
        cost = _redistribution_cost(graph.layers[each.source], each.before, each.after, group, rows)
        inwards[each.target].append(cost)
        borders.append((each, cost, machine.wire.seconds(*cost)))
    for layer, way, brought in zip(graph.layers, ways, inwards, strict=True):
        parts = [cost_of(layer, way, group, rows), *brought]
        seconds = sum(machine.wire.seconds(*part) for part in parts)
        cost = Cost(sum(p.sent_bytes for p in parts), sum(p.messages for p in parts))
        compute_s = compute_of(layer, way, group, rows, machine)
        memory = memory_of(layer, way, group, rows, machine)
        found.append(Placed(layer, way, cost, seconds, compute_s, memory))
    return Plan(tuple(found), group, rows, machine, connections=tuple(borders))
