"""`thinwire bench placement`: one replica on four workers in three placements (SINGA's Fig. 7), and larger networks.

The network has AlexNet's shape: five convolutions and three fully connected layers. Its ratio of computation to
communication allows two cores to compute for four machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.placement import Crew, Layered, part_of
from thinwire.planning import Graph, Machine, Plan, graph_of, plan, profiled, pure
from thinwire.replicas import TrainSpec
from thinwire.rules.placement import Wire
from thinwire_lab.bench.processes import Processes
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.bench.worker_process import Place
from thinwire_lab.testbed import Testbed

WORKERS, RATE, BYTES_PER_S = 4, "1gbit", 125e6
GOODPUT, LATENCY_S = 0.94, 3e-4
"""Share of a link without headers, and the latency between two of four processes on two cores."""
ROWS, MEET_S = 16, 300.0
SPEEDUP, BYTES_OFF, SECONDS_OFF = 2.0, 0.05, 0.3
WIDE = {"0.5 M": 256, "3 M": 640, "16 M": 1408, "66 M": 2880}
"""By number of parameters, the units of each layer of the fully connected network."""


def small_alexnet() -> nn.Module:
    """Five convolutions with many features, and three fully connected layers with many parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16 * 16, 2048), nn.ReLU(),
        nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 100),
    )  # fmt: skip


def connected(wide: int) -> Callable[[], nn.Module]:
    """The fully connected network of Shrivastava et al. (2017)."""

    def made() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(wide, wide), nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Linear(wide, 10))

    return made


SHAPE = (3, 256, 256)


class _Rows(NamedTuple):
    inputs: tuple[Any, ...]
    label: Any
    weight: None = None

    @property
    def num_rows(self) -> int:
        return len(self.label)


@dataclass(frozen=True, kw_only=True)
class _Fixed(Layered):
    name = "fixed"
    chosen: tuple[str, ...]

    def ways(self, graph: Graph, rows: int) -> list[str]:
        return list(self.chosen)


def _network(options: dict[str, Any]) -> tuple[Callable[[], nn.Module], tuple[int, ...], int]:
    if options["network"] == "alexnet":
        return small_alexnet, SHAPE, 100
    return connected(int(options["network"])), (int(options["network"]),), 10


def placed_steps(place: Place, *, ways: list[str], steps: int, rows: int, **options: Any) -> dict[str, Any]:
    """Times steps of a group; counts the bytes that each worker sent, by itself and by its network interface."""
    factory, shape, classes = _network(options)
    crew = Crew(place.worker, place.workers, place.host, place.port)
    address = crew.address if place.worker == 0 else f"{place.first}:{place.port}"
    torch.manual_seed(place.worker)
    batch = _Rows((torch.randn(rows, *shape),), torch.randint(0, classes, (rows,)))
    spec = TrainSpec(loss="cross_entropy", optimizer=lambda p: torch.optim.SGD(p, lr=0.01), device="cpu")
    examples = list(batch.inputs)
    fixed = _Fixed(group_size=place.workers, chosen=tuple(ways))
    part = part_of(fixed, factory, spec, place.worker, crew=crew, examples=examples, rows=rows)
    crew.form(address, "bench", MEET_S)
    times, counted, sent = [], 0, 0
    for step in range(steps + 1):
        crew.tell([0.0])
        if step == 1:
            counted, sent = crew.sent_bytes, _card()
        began = time.perf_counter()
        part.gradient(batch)
        part.update()
        crew.tell([0.0])
        times.append(time.perf_counter() - began)
    result = {"seconds": times[1:], "bytes": (crew.sent_bytes - counted) / steps, "card": (_card() - sent) / steps}
    crew.disband()
    return result


def layer_times(place: Place, *, rows: int, **options: Any) -> dict[str, Any]:
    """Seconds of each layer for one row, while the other workers measure too."""
    factory, shape, _ = _network(options)
    crew = Crew(place.worker, place.workers, place.host, place.port)
    crew.form(crew.address if place.worker == 0 else f"{place.first}:{place.port}", "bench", MEET_S)
    network = factory()
    graph = graph_of(network, shape)
    crew.tell([0.0])
    found = profiled(graph, network, [torch.randn(rows, *shape)], place.workers)
    crew.tell([0.0])
    crew.disband()
    times = {"seconds": [layer.seconds for layer in found.layers]}
    return times | {"shared": [layer.shared_seconds or 0.0 for layer in found.layers]}


def _card() -> int:
    """Bytes sent by the interfaces of this machine or namespace."""
    with open("/proc/net/dev", encoding="ascii") as lines:
        cards = [line.split(":") for line in lines if ":" in line]
    return sum(int(values.split()[8]) for name, values in cards if name.strip() != "lo")


def placement(quick: bool, say: Say) -> Report:
    """Steps a second of three placements, their predictions, and the speed-up of larger networks on more workers."""
    why_not = Testbed.why_not()
    if why_not is not None:
        return Report("placement", [], {}, [f"all of it: {why_not}"])
    measured: dict[str, Any] = {"rate": RATE, "rows": ROWS, "cases": [], "networks": []}
    rows = _three_ways(4 if quick else 12, say, measured)
    rows += _speed_up(quick, say, measured)
    return Report("placement", rows, measured)


def _three_ways(steps: int, say: Say, measured: dict[str, Any]) -> list[Row]:
    graph, rows = graph_of(small_alexnet(), SHAPE), ROWS * WORKERS
    with Testbed(WORKERS + 1, RATE) as bed:
        say("layer times")
        found = Processes(bed, workers=WORKERS).run("layer_times", {"rows": ROWS, "network": "alexnet"})
        graph = _timed(graph, found)
        machine = Machine(wire=Wire(LATENCY_S, BYTES_PER_S * GOODPUT))
        plans = {
            "data": pure(graph, "all data parallel", WORKERS, rows, machine),
            "model": pure(graph, "all model parallel", WORKERS, rows, machine),
            "hybrid": plan(graph, WORKERS, rows, machine),
        }
        for name, chosen in plans.items():
            say(f"{name} parallel, {WORKERS} workers at {RATE}")
            options = {"ways": [p.placement for p in chosen.placed], "steps": steps, "rows": ROWS, "network": "alexnet"}
            results = Processes(bed, workers=WORKERS).run("placed_steps", options)
            measured["cases"].append(_case(name, chosen, results))
    cases = {case["name"]: case for case in measured["cases"]}
    better = min(cases["data"]["step_s"], cases["model"]["step_s"])
    ratio = better / cases["hybrid"]["step_s"]
    detail = ", ".join(f"{name} {case['step_s']:.2f} s" for name, case in cases.items())
    found_rows = [Row("steps a second", "hybrid over the better of data and model", ratio, SPEEDUP, detail)]
    for name, case in cases.items():
        off = abs(case["predicted_bytes"] - case["card_bytes"]) / case["card_bytes"]
        detail = f"predicted {case['predicted_bytes'] / 1e6:.1f} MB, left the card {case['card_bytes'] / 1e6:.1f} MB"
        found_rows.append(Row("bytes, off by", name, off, BYTES_OFF, detail, at_most=True))
    for name, case in cases.items():
        off = abs(case["predicted_s"] - case["step_s"]) / case["step_s"]
        detail = f"predicted {case['predicted_s']:.2f} s, measured {case['step_s']:.2f} s"
        found_rows.append(Row("seconds, off by", name, off, SECONDS_OFF, detail, at_most=True))
    return found_rows


def _timed(graph: Graph, found: list[Any]) -> Graph:
    """The graph with the median of the workers' times."""
    times = [
        [statistics.median(each) for each in zip(*(f[kind] for f in found), strict=True)]
        for kind in ("seconds", "shared")
    ]
    layers = [
        replace(layer, seconds=seconds, shared_seconds=shared or None)
        for layer, seconds, shared in zip(graph.layers, *times, strict=True)
    ]
    return Graph(layers, graph.edges, graph.traced, graph.places, graph.sorts)


def _case(name: str, chosen: Plan, results: list[Any]) -> dict[str, Any]:
    times = [max(each) for each in zip(*(r["seconds"] for r in results), strict=True)]
    return {
        "name": name,
        "seconds": times,
        "step_s": statistics.median(times),
        "bytes": statistics.mean(r["bytes"] for r in results),
        "card_bytes": statistics.mean(r["card"] for r in results),
        "predicted_bytes": chosen.sent_bytes,
        "predicted_s": chosen.step_s,
        "placed": {p.layer.name: p.placement for p in chosen.placed},
    }


def _speed_up(quick: bool, say: Say, measured: dict[str, Any]) -> list[Row]:
    """The model-parallel figure of paper `001`: time on one worker over time on p, for growing networks."""
    found = []
    steps, total = 2 if quick else 6, 64
    for name, wide in list(WIDE.items())[: 2 if quick else None]:
        times = {}
        for workers in (1, 2, 4):
            say(f"fully connected, {name} parameters, {workers} workers")
            rows = total // workers
            graph = graph_of(connected(wide)(), (wide,))
            ways = [p.placement for p in pure(graph, "all model parallel", workers, total).placed]
            with Testbed(workers + 1, RATE) as bed:
                options = {"ways": ways, "steps": steps, "rows": rows, "network": str(wide)}
                results = Processes(bed, workers=workers).run("placed_steps", options)
            times[workers] = statistics.median(max(each) for each in zip(*(r["seconds"] for r in results), strict=True))
        measured["networks"].append({"parameters": name, "wide": wide, "seconds": times})
        for workers in (2, 4):
            detail = f"{times[1]:.3f} s on one, {times[workers]:.3f} s on {workers}"
            found.append(Row("speed-up, model parallel", f"{name} parameters on {workers}", times[1] / times[workers],
                             None, detail))  # fmt: skip
    return found
