"""Trajectories that must not change by accident: `REGENERATE=1 python -m pytest tests/golden` writes them anew."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reference_loop import Loop, Task

from thinwire.strategies import (
    EASGD,
    MPCA,
    STRATEGIES,
    Auto,
    DeepSpark,
    DiLoCo,
    ParameterTable,
    Relay,
    SparkNet,
    Strategy,
    Synchronous,
)

FOLDER = Path(__file__).parent / "trajectories"
STEPS = 60


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


CASES: dict[str, Strategy] = {
    "auto": Auto(),
    "synchronous": Synchronous(),
    "synchronous-int8": Synchronous(codec="int8"),
    "sparknet": SparkNet(period=5),
    "sparknet-time": SparkNet(period_s=0.7),
    "mpca-1": MPCA(fragments=1),
    "mpca-2": MPCA(fragments=2),
    "mpca-3": MPCA(),
    "mpca-gradient": MPCA(form="gradient", pull=1.0, pull_peak=1.0),
    "mpca-unweighted": MPCA(weigh_steps=False),
    "diloco": DiLoCo(period=5),
    "diloco-streaming": DiLoCo(period=6, fragments=3, overlap=True),
    "easgd": EASGD(period=5),
    "easgd-momentum": EASGD(period=5, momentum=0.5, pull=0.2),
    "deepspark": DeepSpark(period=5),
    "parameter-table": ParameterTable(optimizer=momentum),
    "parameter-table-strict": ParameterTable(consistency="strict", optimizer=momentum),
    "relay": Relay(),
    "relay-2-bits": Relay(bits=2, fragments=4, momentum=0.3),
    "relay-8-bits": Relay(bits=8, fragments=1, momentum=0.0),
}


def trajectory(strategy: Strategy) -> dict[str, list[float]]:
    """Losses and a few coordinates of the joint model and of one replica, every tenth step."""
    task = Task.make(4, size=1024, rows=200)
    loop = Loop(strategy, task, lr=0.02)
    found: dict[str, list[float]] = {"loss": [], "joint": [], "replica": []}
    for step in range(1, STEPS + 1):
        loop.step()
        if step % 10 == 0:
            found["loss"].append(task.loss(loop.model))
            found["joint"] += [float(loop.model[i]) for i in (0, 300, 700, 1023)]
            found["replica"] += [float(loop.x[3][i]) for i in (1, 500, 1000)]
    return found


def test_every_strategy_has_a_trajectory() -> None:
    assert {type(s) for s in CASES.values()} == set(STRATEGIES.values())


@pytest.mark.parametrize("name", CASES)
def test_a_trajectory_is_the_one_on_record(name: str) -> None:
    path = FOLDER / f"{name}.json"
    shown = dataclasses.replace(CASES[name], optimizer=None) if "table" in name else CASES[name]
    found = {"strategy": repr(shown), **trajectory(CASES[name])}
    if os.environ.get("REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(path.read_text())
    assert found["strategy"] == recorded["strategy"]
    for key in ("loss", "joint", "replica"):
        assert found[key] == pytest.approx(recorded[key], rel=2e-3, abs=2e-4), key
    assert recorded["loss"][-1] < recorded["loss"][0]
