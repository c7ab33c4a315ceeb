"""Every sort of network, placed in every way on real processes, does what it does on one worker."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from thinwire.placement import Crew, Layered, Pipeline, Placement, Planned, TensorParallel, assembled, part_of
from thinwire.planning import Graph
from thinwire.planning.planner import choices
from thinwire.replicas import TrainSpec

from . import networks
from .group import together
from .networks import NETWORKS, cut, rows_for

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(networks)

SIZES = (4, 3, 4)
"""Rows of each member: not the same for all."""
STEPS, SEED, CLIP = 3, 7, 0.5
WAYS = ("data", "column", "row", "mixed 1", "mixed 2", "mixed 3", "planned", "tensor parallel", "pipeline")
STAGES = {"recurrent": 3, "lstm": 3, "gru": 3, "last state": 2, "optional": 3, "tied": 2, "peepholes": 2}
STAGES |= dict.fromkeys(networks.ZOO_OF_SEQUENCES, 3)
NAMED: dict[str, Callable[[int], Placement]] = {
    "planned": lambda size: Planned(group_size=size, link_gbit=1000.0, latency_ms=0.0),  # so that it shares layers out
    "tensor parallel": lambda size: TensorParallel(group_size=size),
    "pipeline": lambda size: Pipeline(group_size=size, microbatches=2),
}


@dataclass(frozen=True, kw_only=True)
class Preferred(Layered):
    """Every layer as asked for, as far as it can be; or by lot."""

    name = "preferred"
    way: str

    def ways(self, graph: Graph, rows: int) -> list[str]:
        options = [choices(layer, self.group_size) for layer in graph.layers]
        if self.way.startswith("mixed"):
            source = random.Random(self.way)
            return [source.choice(each) for each in options]
        wanted = {"data": ("data", "rows"), "column": ("column", "features"), "row": ("row", "features")}[self.way]
        return [next((way for way in wanted if way in each), each[0]) for each in options]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Settings by number of dimensions in the first half, and others in the second."""
    held = list(parameters)
    half = len(held) // 2
    groups = [
        {"params": [p for p in held[:half] if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in held[:half] if p.dim() == 1], "lr": 0.3, "momentum": 0.5},
        {"params": held[half:]},
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def spec(optimizer: Any = optimizer) -> TrainSpec:
    return TrainSpec(loss="cross_entropy", optimizer=optimizer, seed=SEED, clip_norm=CLIP, device="cpu")


def trained(crew: Crew, name: str, ways: tuple[str, ...], sizes: tuple[int, ...], weighted: bool) -> dict[str, Any]:
    """One member's losses, parameters and evaluation, by way."""
    start = sum(sizes[: crew.part])
    batch = cut(rows_for(name, sum(sizes), weighted=weighted), start, start + sizes[crew.part])
    found = {}
    for way in ways:
        named = NAMED.get(way)
        placement = Preferred(group_size=crew.size, way=way) if named is None else named(crew.size)
        part = part_of(placement, NETWORKS[name][0], spec(), crew.part, crew=crew,
                       examples=list(batch.inputs), rows=max(sizes))  # fmt: skip
        part.stand_in(batch)
        losses = []
        for _ in range(STEPS):
            losses.append(part.gradient(batch))
            part.update()
        sums, weights, _ = part.evaluate([batch], part.vector.clone(), {})
        found[way] = (losses, part.state_of(part.vector, {}), sums["val_loss"], weights["val_loss"], part.ways)
    return found


def alone(name: str, count: int, weighted: bool) -> tuple[list[float], dict[str, torch.Tensor], float]:
    rows = rows_for(name, count, weighted=weighted)
    torch.manual_seed(SEED)
    module = NETWORKS[name][0]()
    stepping = optimizer(module.parameters())

    def loss() -> torch.Tensor:
        each = nn.functional.cross_entropy(module(*rows.inputs), rows.label, reduction="none")
        return each.mean() if rows.weight is None else (each * rows.weight).sum() / rows.weight.sum()

    losses = []
    for _ in range(STEPS):
        stepping.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        stepping.step()
        losses.append(value.item())
    return losses, module.state_dict(), loss().item()


FEW = ("connected", "convolutional", "lstm", "own", "char_lstm_peephole")
"""Networks for `make test`: one that is weighted, one of images, some of sequences, one with layers of its own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.long) for name in NETWORKS]
)
def test_every_placement_gives_the_losses_and_parameters_of_one_worker(name: str) -> None:
    sizes = SIZES[: STAGES.get(name, len(SIZES))]
    weighted = name == "connected"
    ways = tuple(way for way in WAYS if (name, way) != ("tied", "pipeline"))  # its two ends are one matrix
    members = together(len(sizes), functools.partial(trained, name=name, ways=ways, sizes=sizes, weighted=weighted))
    losses, state, last = alone(name, sum(sizes), weighted)
    rows = rows_for(name, sum(sizes), weighted=weighted)
    counts = [float(each.sum()) for each in (rows.weight if weighted else torch.ones(sum(sizes))).split(list(sizes))]  # type: ignore[union-attr, no-untyped-call]
    seen = set()
    for way in ways:
        each = [member[way] for member in members]
        for step in range(STEPS):
            said = [part[0][step] for part in each]
            mean = said[0] if way == "pipeline" else sum(a * b for a, b in zip(said, counts, strict=True)) / sum(counts)
            assert mean == pytest.approx(losses[step], abs=1e-5), (way, step)
        found = assembled([part[1] for part in each])
        if name == "tied":  # it is there once, under its first name
            found["out.weight"] = found["embedding.weight"]
        assert set(found) == set(state)
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=0, msg=f"{way}: {key}")
        evaluated = sum(part[2] for part in each) / sum(part[3] for part in each)
        assert evaluated == pytest.approx(last, abs=1e-5), way
        seen |= set(each[0][4])
    assert "column" in seen or name in ("last state", "tied")
    if name in ("own", "peepholes", *networks.ZOO_OF_SEQUENCES):  # no layer with parameters is whole on every member
        shared = {
            portion["name"]
            for member in members
            for portion in member["column"][1]["portions"]
            if portion["dim"] is not None
        }
        assert {key for key, value in state.items() if value.numel() > 1 and "weight" in key} <= shared
    assert any(str(way).startswith("stage") for way in seen) or name == "tied"


def busy(crew: Crew, way: str) -> tuple[float, int]:
    """Peak memory of training a network of 67 million parameters, and how much of it there was before."""

    def network() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64)))

    torch.set_num_threads(1)
    rows = networks.Rows((torch.randn(4, 1024),), torch.randint(0, 1024, (4,)))
    few: Any = functools.partial(part_of, Preferred(group_size=crew.size, way=way), lambda: nn.Linear(1024, 1024))
    few(
        spec(momentum), 0, crew=crew, examples=list(rows.inputs), rows=4
    )  # what is loaded for it counts as there before
    before = _memory("VmRSS")
    if crew.size == 1:
        from thinwire.replicas import TorchReplica

        part: Any = TorchReplica(network, spec(momentum), 0)
    else:
        placement = Preferred(group_size=crew.size, way=way)
        part = part_of(placement, network, spec(momentum), 0, crew=crew, examples=list(rows.inputs), rows=4)
    for _ in range(3):
        part.gradient(rows)
        part.update()
    return _memory("VmHWM") - before, before


def _memory(name: str) -> int:
    """What the system counts for this process since it was started; getrusage counts its parent's peak too."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def test_the_peak_memory_of_four_workers_is_a_quarter_each() -> None:
    """With no member ever holding the whole network, not even while it is made."""
    (one,) = together(1, functools.partial(busy, way="data"))
    four = together(4, functools.partial(busy, way="column"))
    assert max(peak for peak, _ in four) <= 1.2 * one[0] / 4
