"""The engine against the loop in `strategies/base.py`, in virtual time: each strategy takes the same way in both.

Every batch is a worker's whole shard. What is compared is where each replica is when its gradient is taken, at every
step: all else that replicas and joint model do shows there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.reference_loop import STEP_S, Loop, Task
from torch import Tensor, nn

import thinwire as tw
from thinwire.data import Shard
from thinwire.data.sources import open_source
from thinwire.data.split import split
from thinwire.strategies import STRATEGIES, Measured, Setting, Strategy

WORKERS, SIZE, ROWS, STEPS, LR = 4, 1024, 200, 40, 0.02
EXACT = 1e-4
"""Over the largest parameter: float32 sums in another order, which forty steps make more of."""


class Held:
    """A strategy that adapts to what it measures, held at one setting without loss on the wire."""

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        first: Setting = super().setting(replace(measured, rounds=0, link=None, step_s=None), None)  # type: ignore[misc]
        return replace(first, codec="float32", momentum=0.3)

    def probe(self, setting: Setting) -> Setting:
        return setting


@dataclass(frozen=True, kw_only=True)
class HeldRelay(Held, tw.Relay):
    pass


@dataclass(frozen=True, kw_only=True)
class HeldAuto(Held, tw.Auto):
    pass


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


CASES: dict[str, tuple[Strategy, float]] = {
    "synchronous": (tw.Synchronous(), EXACT),
    "synchronous in int8": (tw.Synchronous(codec="int8"), 0.02),
    "sparknet": (tw.SparkNet(period=5), EXACT),
    "sparknet by time": (tw.SparkNet(period_s=4.5 * STEP_S), EXACT),
    "mpca with 1 fragment": (tw.MPCA(fragments=1), EXACT),
    "mpca with 2 fragments": (tw.MPCA(fragments=2), EXACT),
    "mpca with 3 fragments": (tw.MPCA(), EXACT),
    "mpca by gradient": (tw.MPCA(form="gradient", pull=1.0, pull_peak=1.0), EXACT),
    "mpca unweighted": (tw.MPCA(weigh_steps=False), EXACT),
    "diloco": (tw.DiLoCo(period=5), EXACT),
    "diloco with fragments and overlap": (tw.DiLoCo(period=6, fragments=3, overlap=True), EXACT),
    "easgd": (tw.EASGD(period=5, servers=1), EXACT),
    "easgd at every step": (tw.EASGD(period=1, servers=1), EXACT),
    "easgd with momentum": (tw.EASGD(period=5, momentum=0.5, pull=0.2, servers=1), EXACT),
    "deepspark": (tw.DeepSpark(period=5, servers=1), EXACT),
    "parameter table": (tw.ParameterTable(optimizer=momentum, servers=1), EXACT),
    "parameter table, strict": (tw.ParameterTable(consistency="strict", optimizer=adam), EXACT),
    "relay": (HeldRelay(fragments=1), EXACT),
    "relay with fragments": (HeldRelay(fragments=4), EXACT),
    "relay in 8 bits": (tw.Relay(bits=8, fragments=2, momentum=0.3), 0.02),
    "auto": (HeldAuto(fragments=2), EXACT),
}


class Regression(nn.Module):
    """Least squares from zero, which tells where it is whenever it is asked in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.passes = 0  # each replica by itself

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            been.setdefault(round(float(x.double().sum()), 3), []).append(self.layer.weight.detach().flatten().clone())
        found: Tensor = self.layer(x)
        return found


been: dict[float, list[Tensor]] = {}
"""By the sum of a worker's rows, where its replica was at each step."""


class Watched:
    """A task that notes where each replica of the loop is when its gradient is taken."""

    def __init__(self, task: Task) -> None:
        self._task, self.been = task, [list[Tensor]() for _ in range(WORKERS)]

    def gradient(self, worker: int, x: Tensor) -> Tensor:
        self.been[worker].append(x.clone())
        return self._task.gradient(worker, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    whole = Task.make(WORKERS, size=SIZE, rows=ROWS)
    return {"x": torch.cat(whole.inputs), "label": torch.cat(whole.labels)}


@pytest.fixture(scope="module")
def task(data: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The rows as `fit` deals them to workers."""
    files = split(open_source(data), workers=WORKERS, directory=str(tmp_path_factory.mktemp("rows")), seed=0)
    inputs, labels = [], []
    for file in files:
        rows = Shard.open(file.train)
        columns = rows.take(np.arange(rows.num_rows), ["x", "label"])
        inputs.append(torch.as_tensor(columns["x"]))
        labels.append(torch.as_tensor(columns["label"]))
    return Task(inputs, labels, torch.zeros(SIZE))


def test_every_strategy_is_compared() -> None:
    assert {kind for kind in STRATEGIES.values() if not any(isinstance(s, kind) for s, _ in CASES.values())} == set()


@pytest.mark.parametrize("name", CASES)
def test_the_engine_takes_the_way_of_the_loop(name: str, data: dict[str, Tensor], task: Task) -> None:
    strategy, tolerance = CASES[name]
    been.clear()
    tw.fit(
        Regression, data, inputs=["x"], loss="mse", optimizer=lambda p: torch.optim.SGD(p, lr=LR), strategy=strategy,
        steps=STEPS, batch_size=ROWS, progress=False,
        cluster=tw.Simulated(
            workers=WORKERS, step_s=STEP_S, link="100gbit", latency_s=1e-6,
            slow={w: 1 + 1e-4 * w for w in range(WORKERS)},  # they meet a server in their order
        ),
    )  # fmt: skip
    watched: Any = Watched(task)
    loop = Loop(strategy, watched, lr=LR, own_losses=True)
    for _ in range(STEPS):
        loop.step()
    for worker, rows in enumerate(task.inputs):
        engine = been[round(float(rows.double().sum()), 3)][-STEPS:]  # one is looked at before the first step
        assert len(engine) == STEPS
        largest = max(float(x.abs().max()) for x in engine)
        apart = [float((a - b).abs().max()) / largest for a, b in zip(engine, watched.been[worker], strict=True)]
        assert max(apart) < tolerance, (
            f"worker {worker} from step {next(i for i, d in enumerate(apart) if d > tolerance)}"
        )
