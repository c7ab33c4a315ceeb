"""The planner against exhaustive search, and on the networks of the papers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from thinwire.errors import ConfigError
from thinwire.models import ZOO
from thinwire.planning import Graph, Layer, Machine, Plan, graph_of, plan
from thinwire.planning.planner import border, choices, compute_of, cost_of, memory_of
from thinwire.planning.solver import cheapest
from thinwire.rules.placement import Wire


def random_graph(source: random.Random, most: int = 12) -> Graph:
    """A chain with branches that leave and come back, as networks have them."""
    layers = [Layer("x", "input", "input", features=source.randint(1, 5000))]
    edges: set[tuple[int, int]] = set()
    for place in range(1, source.randint(3, most)):
        kind: Any = source.choice(["split", "split", "split", "channels", "rows"])
        size = source.choice([0, 100, 10_000, 1_000_000]) if kind != "channels" else 0
        outputs, units = source.randint(1, 64), source.choice([0, 1, 64])
        features = source.randint(1, 5000)
        layers.append(Layer(str(place), kind, kind, size, features, layers[-1].features, 1.0, outputs, units))
        edges.add((place - 1, place))
        if place > 2 and source.random() < 0.3:
            edges.add((source.randrange(place - 1), place))
    return Graph(layers, sorted(edges))


def exhaustive(graph: Graph, group: int, rows: int, machine: Machine) -> float | None:
    """SINGA's Algorithm 2: the seconds of a step of the best of all combinations."""
    options = [choices(layer, group) for layer in graph.layers]
    best = None
    for ways in itertools.product(*options):
        if machine.memory_bytes is not None:
            parts = zip(graph.layers, ways, strict=True)
            if sum(memory_of(layer, way, group, rows, machine) for layer, way in parts) > machine.memory_bytes:
                continue
        costs = [cost_of(layer, way, group, rows) for layer, way in zip(graph.layers, ways, strict=True)]
        costs += [border(graph.layers[a], graph.layers[b], ways[a], ways[b], group, rows) for a, b in graph.edges]
        total = sum(machine.wire.seconds(*cost) for cost in costs)
        parts = zip(graph.layers, ways, strict=True)
        total += sum(compute_of(layer, way, group, rows, machine) for layer, way in parts)
        best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("batch", range(20))
def test_a_plan_is_the_best_of_all_combinations(batch: int) -> None:
    """2,000 random networks; of more than nine layers only some, of which all combinations are many."""
    for seed in range(100 * batch, 100 * batch + 100):
        source = random.Random(seed)
        graph = random_graph(source, most=12 if seed % 50 == 0 else 8)
        group, rows = source.choice([2, 3, 4, 8]), source.choice([8, 64, 512])
        machine = Machine(wire=Wire(source.choice([0.0, 1e-4, 1e-2]), 125e6, source.random() < 0.5))
        assert plan(graph, group, rows, machine).step_s == pytest.approx(exhaustive(graph, group, rows, machine))


@pytest.mark.parametrize("batch", range(10))
def test_a_plan_under_a_limit_of_memory_is_the_best_that_keeps_it(batch: int) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        source = random.Random(seed)
        graph = random_graph(source, most=8)
        group, rows = source.choice([2, 4]), source.choice([8, 64])
        free = plan(graph, group, rows)
        machine = Machine(memory_bytes=free.memory_bytes * source.uniform(0.4, 1.0))
        best = exhaustive(graph, group, rows, machine)
        if best is None:
            with pytest.raises(ConfigError, match="no placement on"):
                plan(graph, group, rows, machine)
        else:
            found = plan(graph, group, rows, machine)
            assert found.memory_bytes <= machine.memory_bytes  # type: ignore[operator]
            assert found.step_s == pytest.approx(best)


def timed(graph: Graph, source: random.Random) -> Graph:
    """The graph with layer times as if measured, of all orders of magnitude; some layers gain by being shared out."""
    layers = []
    for layer in graph.layers:
        shared = 10 ** source.uniform(-9, 1) if layer.kind == "split" and source.random() < 0.8 else None
        layers.append(replace(layer, seconds=10 ** source.uniform(-9, 1), shared_seconds=shared))
    return Graph(layers, graph.edges)


@given(some.integers(0, 10_000), some.booleans())
def test_a_plan_of_measured_layers_is_the_best_of_all_combinations(seed: int, limited: bool) -> None:
    source = random.Random(seed)
    graph = timed(random_graph(source, most=8), source)
    group, rows = source.choice([2, 4]), source.choice([8, 64])
    machine = Machine(memory_bytes=source.uniform(1e5, 1e7) if limited else None)
    best = exhaustive(graph, group, rows, machine)
    if best is None:
        with pytest.raises(ConfigError, match="no placement on"):
            plan(graph, group, rows, machine)
    else:
        assert plan(graph, group, rows, machine).step_s == pytest.approx(best)


@given(some.integers(0, 10_000), some.floats(0.3, 1.5), some.integers(3, 40))
def test_no_plan_is_slower_than_one_of_its_own_list(seed: int, share: float, most: int) -> None:
    """With more than sixteen layers under a limit of memory the planner looks at a sample of all combinations."""
    source = random.Random(seed)
    graph = timed(random_graph(source, most=most), source)
    group, rows = source.choice([2, 3, 8]), source.choice([8, 512])
    wire = Wire(source.choice([0.0, 1e-2]), 10 ** source.uniform(4, 10), source.random() < 0.5)
    free = plan(graph, group, rows, Machine(wire=wire))
    for machine in (Machine(wire=wire), Machine(memory_bytes=free.memory_bytes * share, wire=wire)):
        try:
            found = plan(graph, group, rows, machine)
        except ConfigError:
            assert share < 1
            continue
        assert all(found.step_s <= step_s for step_s, _, _ in found.alternatives.values())
        listed = {*found.alternatives, *found.too_large}
        assert listed == {"all data parallel", "all model parallel"}
        assert all(memory > machine.memory_bytes for memory in found.too_large.values())  # type: ignore[operator]


def test_a_layer_that_computes_slowly_in_shares_stays_whole() -> None:
    """By what is sent alone, shares of its outputs would cost less: 320 seconds a step instead of 14 ms."""
    layers = [
        Layer("x", "input", "input", features=10),
        Layer("a", "Linear", "split", 1_000_000, 10, 10, 1.0, 10, 10, seconds=1e-5, shared_seconds=5.0),
    ]
    found = plan(Graph(layers, [(0, 1)]), 2, 64)
    assert found.placed[1].placement == "data"
    assert found.step_s < 0.1


def test_a_plan_under_a_limit_says_which_usual_placements_do_not_fit() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(2000, 2000), nn.Linear(2000, 10)), (2000,))
    free = plan(graph, 2, 8)
    least = min(memory for _, _, memory in free.alternatives.values())
    found = plan(graph, 2, 8, Machine(memory_bytes=least * 1.01))
    assert set(found.too_large) == {"all data parallel"}
    assert set(found.alternatives) == {"all model parallel"}


def test_a_large_graph_keeps_its_limit() -> None:
    source = random.Random(0)
    costs = [[source.random(), source.random()] for _ in range(200)]
    memory = [[source.random(), source.random()] for _ in range(200)]
    edges = {(n, n + 1): [[0.0, 0.1], [0.1, 0.0]] for n in range(199)}
    free = cheapest(costs, edges, memory)
    assert free is not None
    limit = 0.8 * sum(memory[node][choice] for node, choice in enumerate(free))
    found = cheapest(costs, edges, memory, limit)
    assert found is not None
    assert sum(memory[node][choice] for node, choice in enumerate(found)) <= limit


def planned(name: str, shape: tuple[int, ...], group: int = 4, batch: int = 64) -> Plan:
    with torch.device("meta"):
        network = ZOO[name]()
    return plan(graph_of(network, shape), group, group * batch)


@pytest.mark.parametrize(("name", "shape"), [("alexnet", (3, 227, 227)), ("vgg_a", (3, 224, 224))])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_convolutions_are_data_parallel_and_fully_connected_layers_model_parallel(
    name: str, shape: tuple[int, ...], group: int
) -> None:
    """As SINGA found (§4.3)."""
    found = planned(name, shape, group)
    placed: dict[str, set[str]] = {"Conv2d": set(), "Linear": set()}
    for part in found.placed:
        if part.layer.kind == "split":
            placed[part.layer.what].add(part.placement)
    assert placed["Conv2d"] == {"data"}
    assert placed["Linear"] <= {"column", "row"}
    assert all(found.step_s < step_s for step_s, _, _ in found.alternatives.values())


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [
        ("alexnet", 60_965_224, (3, 227, 227)),
        ("vgg_a", 132_863_336, (3, 224, 224)),
        ("googlenet", 6_998_552, (3, 224, 224)),
        ("resnet34", 21_797_672, (3, 224, 224)),
        ("resnet152", 60_192_808, (3, 224, 224)),
    ],
)
def test_networks_have_the_parameters_that_were_published(name: str, parameters: int, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        network = ZOO[name]()
    graph = graph_of(network, shape)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert graph.parameters == parameters, "each layer's are found, none twice"
    assert plan(graph, 4, 256).exchange_s < plan(graph, 4, 256).alternatives["all model parallel"][0]


def test_the_first_layers_of_alexnet_are_those_of_the_paper() -> None:
    """SINGA's Table 2."""
    parts = [part.layer for part in planned("alexnet", (3, 227, 227)).placed]
    found = [(layer.parameters, layer.features) for layer in parts]
    assert (34_944, 290_400) in found
    assert (0, 69_984) in found
    assert (37_752_832, 4096) in found


def test_what_a_plan_cannot_read_is_said() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfigError, match=r"Branching could not be read.*torch\.fx"):
        graph_of(Branching(), (3,))
    with pytest.raises(ConfigError, match=r"does not take rows of shape \(5,\)"):
        graph_of(nn.Sequential(nn.Linear(3, 2)), (5,))
    with pytest.raises(ConfigError, match="cannot share 2 rows"):
        plan(Graph([Layer("x", "input", "input")]), 4, 2)


def kinds(module: nn.Module, *shape: int) -> dict[str, str]:
    return {layer.name: layer.kind for layer in graph_of(module, shape).layers}


class Looks(nn.Module):
    """Joins rows and steps of time, as before a layer that is to work on each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, 1))


class Shortcut(nn.Module):
    """Its shortcut reads what the ReLU has written over."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(self.relu(x)) + x


def test_what_only_looks_like_channels_lies_by_rows() -> None:
    assert kinds(Looks(), 5, 6)["flatten"] == "rows"
    pool = nn.Sequential(nn.MaxPool2d(2))
    assert kinds(pool, 8, 8)["0"] == "rows"  # torch takes three dimensions for one row without channels
    assert kinds(pool, 3, 8, 8)["0"] == "channels"
    assert kinds(nn.Sequential(nn.MaxPool1d(2)), 8)["0"] == "rows"
    assert kinds(nn.Sequential(nn.BatchNorm1d(8)), 8)["0"] == "channels"


def test_what_is_written_over_is_not_moved_before() -> None:
    graph = graph_of(Shortcut(), (8,))
    (source,) = [layer for layer in graph.layers if layer.name == "a"]
    assert source.pinned
    assert choices(source, 2) == ("data", "row")
