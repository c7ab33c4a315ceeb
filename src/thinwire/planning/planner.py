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
"""By placement, how a layer's input must lie on the group, and how its output lies there."""


PURE = {"all data parallel": ("data", "rows"), "all model parallel": ("column", "features")}
"""What a plan is compared with: the placements that each takes wherever they are possible."""


@dataclass(frozen=True)
class Machine:
    """One worker, as far as a plan needs to know it."""

    flops_per_s: float = 5e10
    memory_bytes: float | None = None
    wire: Wire = field(default_factory=Wire)
    optimizer_floats: int = 1
    """Floats of optimizer state for each parameter."""


class Connection(NamedTuple):
    """A layer at a border: it brings activations from how one layer leaves them to how another needs them."""

    source: int
    """The layer before it, by its place in the graph."""
    target: int
    before: Way
    """How activations lie on the group when they come in."""
    after: Way
    """How they lie when they go out."""

    @property
    def what(self) -> str:
        """What it does on the way forward, and with gradients on the way back."""
        return OPERATIONS[self.before, self.after]


OPERATIONS: dict[tuple[Way, Way], str] = {
    ("rows", "full"): "all-gather, reduce-scatter back",
    ("features", "full"): "all-gather, reduce-scatter back",
    ("rows", "features"): "all-to-all, and back",
    ("features", "rows"): "all-to-all, and back",
}


class Placed(NamedTuple):
    """A layer and what became of it."""

    layer: Layer
    placement: str
    cost: Cost
    """What a worker sends for it in a step, its borders with the layers before it included."""
    seconds: float
    """Communication."""
    compute_s: float
    memory_bytes: float


Planner = Callable[[Graph, int, int, "Machine"], "Plan"]


@dataclass(frozen=True)
class Plan:
    """A placement for every layer, on a group of workers that trains one replica."""

    placed: tuple[Placed, ...]
    group: int
    rows: int
    """Of the whole group in a step."""
    machine: Machine
    alternatives: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds of a step, bytes and memory of a worker, of the usual placements that fit into its memory."""
    too_large: Mapping[str, float] = field(default_factory=dict)
    """Bytes on a worker of the usual placements that do not fit."""
    connections: tuple[tuple[Connection, Cost, float], ...] = ()
    """The layers at borders, with what a worker sends for each and the seconds of that."""
    between: Cost = NOTHING
    """What a worker sends in a step to the workers of other replicas, where that was asked for."""
    between_s: float = 0.0
    """Seconds of a step in which it waits for them."""

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
        """Seconds of a step within a group, were nothing hidden behind anything."""
        return self.compute_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Seconds of a step, with what replicas exchange: computing, within the group, and between groups."""
        return self.step_s + self.between_s

    @property
    def memory_bytes(self) -> float:
        return sum(p.memory_bytes for p in self.placed)

    @property
    def alone_s(self) -> float:
        """Seconds in which one worker alone would compute the same rows, were its memory large enough."""
        return sum(compute_of(p.layer, "data", 1, self.rows, self.machine) for p in self.placed)


def choices(layer: Layer, group: int) -> tuple[str, ...]:
    """The ways to place a layer on a group."""
    many, column = group > 1 and layer.outputs >= group, [] if layer.pinned else ["column"]
    if layer.kind == "split":
        return ("data", *(column if many else []), *(["row"] if many and layer.units_in >= group else []))
    return ("rows", "features") if layer.kind == "channels" and many and not layer.pinned else ("rows",)


def cost_of(layer: Layer, placement: str, group: int, rows: int) -> Cost:
    """What a worker sends in a step for a layer itself."""
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
    """What a worker sends to bring a layer's output to where the next one needs it; an input has no gradient."""
    cost = NOTHING
    for before, after in turns(source, target, given, wanted):
        cost = _both(cost, _turned(source, before, after, group, rows))
    return cost


def _turned(source: Layer, before: Way, after: Way, group: int, rows: int) -> Cost:
    cost = redistributed(before, after, source.features, rows, group)
    return Cost(cost.sent_bytes / 2, cost.messages / 2) if source.kind == "input" else cost


def connections(graph: Graph, ways: Sequence[str]) -> list[Connection]:
    """The layers that stand at the borders of layers which are placed in these ways, in the order of the graph."""
    return [
        Connection(source, target, before, after)
        for source, target in graph.edges
        for before, after in turns(graph.layers[source], graph.layers[target], ways[source], ways[target])
    ]


def turns(source: Layer, target: Layer, given: str, wanted: str) -> list[tuple[Way, Way]]:
    """From which way to which activations are brought between two layers, one after the other."""
    before, after = WAYS[given][1], WAYS[wanted][0]
    if before == after == "features" and source.feature_dim != target.wanted_dim:
        return [("features", "rows"), ("rows", "features")]
    return [] if before == after else [(before, after)]


def _both(one: Cost, other: Cost) -> Cost:
    return Cost(one.sent_bytes + other.sent_bytes, one.messages + other.messages)


def memory_of(layer: Layer, placement: str, group: int, rows: int, machine: Machine) -> float:
    """Bytes on one worker: parameters, gradients and the optimizer's state; the output; an input that is gathered."""
    share = 1 if placement in ("data", "rows") else group
    each = FLOAT * layer.parameters  # of what is whole on each worker the optimizer's state is still shared out
    parameters = each * (2 / share + machine.optimizer_floats / group)
    gathered = FLOAT * layer.inputs * rows if placement == "column" and group > 1 else 0.0
    return parameters + FLOAT * layer.features * rows / group + gathered


def compute_of(layer: Layer, placement: str, group: int, rows: int, machine: Machine) -> float:
    """Seconds that a worker computes on a layer in a step: as measured, or else by the layer's operations."""
    each = layer.seconds if layer.seconds is not None else layer.flops / machine.flops_per_s
    if placement in ("column", "row") and layer.shared_seconds is not None:
        each = layer.shared_seconds * group
    return each * rows / group


def plan(graph: Graph, group: int, rows: int, machine: Machine | None = None) -> Plan:
    """The plan whose step takes least time, computing and sending, of those that fit into the workers' memory.

    Args:
        graph: the network.
        group: workers that train one replica together.
        rows: of the whole group in a step.
        machine: what each worker is, and the link between them.
    """
    machine = machine or Machine()
    if group < 1 or rows < group:
        raise ConfigError(f"a group of {group} workers cannot share {rows} rows a step; give each of them one at least")
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
        if other.step_s < best.step_s:  # of a large graph under a limit only a sample of all combinations is looked at
            best = other
    return replace(best, alternatives=fits, too_large=too_large)


@dataclass(frozen=True)
class Between:
    """How often replicas exchange.

    Args:
        period: steps between two exchanges of a parameter.
        waits: whether steps wait for an exchange; else only for what of it is longer than the steps between two.
    """

    period: float = 1.0
    waits: bool = True


def with_exchange(found: Plan, graph: Graph, workers: int, between: Between) -> Plan:
    """The plan with what the replicas of all workers exchange: each member its part, with its lane."""
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
    """A plan for each size that groups of these workers can have and a replica fits into, from the smallest on.

    Every worker brings its batch, so a step takes the same rows in all: the plan with the least `total_s` is the best.

    Args:
        graph: the network.
        workers: of the cluster.
        batch: rows of a worker's step.
        machine: what each worker is, and the link between them.
        between: how often replicas exchange.
        planned: what places layers in groups of a size; `plan` unless said.
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
    """The plan that places every layer in the same way, as far as it can be."""
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
        least = min(computing)  # only what a placement adds is compared: where nothing does, not even rounding counts
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
    """The plan in which layers are placed in these ways."""
    found, borders = [], []
    inwards: list[list[Cost]] = [[] for _ in graph.layers]
    for each in connections(graph, ways):
        cost = _turned(graph.layers[each.source], each.before, each.after, group, rows)
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
