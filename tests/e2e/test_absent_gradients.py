"""Parameters without a gradient in a step: unused branches, stages one after the other, freezing as a run goes on.

torch leaves such a parameter alone: neither momentum nor weight decay moves it. Over several workers a parameter takes
a step where any of them has a gradient of it, with the mean to which the others give zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.strategies import Strategy

ROWS, STEPS, TURN = 48, 9, 4
TOLERANCE = 2e-5


class Unused(nn.Module):
    """With layers beside those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


class Staged(nn.Module):
    """Learns its first layer for a few steps, then its last, then both in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(6, 20), nn.Linear(20, 3), nn.Linear(20, 3)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        begins = self.passes < TURN or self.passes % 2 == 0
        if self.training:
            self.passes += 1
        found: torch.Tensor = self.read(hidden) if begins else self.last(hidden.detach())
        return found


class Freezing(Unused):
    """Freezes its first layer after a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.first.requires_grad_(self.passes <= TURN)
        return super().forward(x)


class Routed(nn.Module):
    """Rows above a value go through a layer of their own, which one worker has and the other has not."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.first, self.rare, self.last = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1  # each replica by itself
        hidden = torch.tanh(self.first(x))
        rare = x[:, 0] > 10
        if bool(rare.any()) and self.passes % 3:
            hidden = torch.where(rare[:, None], hidden + self.rare(hidden), hidden)
        found: torch.Tensor = self.last(hidden)
        return found


def rows() -> dict[str, torch.Tensor]:
    x = torch.linspace(-2.0, 2.0, ROWS * 6).reshape(ROWS, 6).sin() * 2
    label = (x.sum(1) * 3).long() % 3
    x[5, 0] = 11.0
    return {"x": x, "label": label}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def damped(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.5)


def by_layer(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    return torch.optim.Adam([{"params": held[:2], "lr": 0.05}, {"params": held[2:]}], lr=0.01, weight_decay=0.1)


def fit(model: Callable[[], nn.Module], optimizer: Any, strategy: Strategy, size: int = 1, **more: Any) -> nn.Module:
    workers = 2 * size
    settings: dict[str, Any] = {
        "steps": STEPS, "batch_size": ROWS // workers, "inputs": ["x"], "progress": False,
        "placement": tw.Planned(group_size=size) if size > 1 else None,
        "cluster": tw.Simulated(workers=workers, step_s=0.01),
    }  # fmt: skip
    return tw.fit(model, rows(), optimizer=optimizer, strategy=strategy, **(settings | more)).model


def plain(model: Callable[[], nn.Module], optimizer: Any, steps: int = STEPS) -> nn.Module:
    torch.manual_seed(0)
    made, data = model(), rows()
    stepping = optimizer(made.parameters())
    for _ in range(steps):
        stepping.zero_grad()
        nn.functional.cross_entropy(made(data["x"]), data["label"]).backward()
        stepping.step()
    return made


def differ(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


TOGETHER: dict[str, Strategy] = {
    "synchronous": tw.Synchronous(),
    "strict table": tw.ParameterTable(consistency="strict", tuple_size=70),
    "one group of a table": tw.ParameterTable(groups=1, tuple_size=70),
}


@pytest.mark.parametrize("optimizer", [momentum, adam, damped, by_layer])
@pytest.mark.parametrize("model", [Unused, Staged, Freezing, Routed])
@pytest.mark.parametrize("how", TOGETHER)
def test_workers_that_step_together_leave_alone_what_one_worker_leaves_alone(
    how: str, model: Callable[[], nn.Module], optimizer: Any
) -> None:
    assert differ(fit(model, optimizer, TOGETHER[how]), plain(model, optimizer)) < TOLERANCE


@pytest.mark.parametrize("how", TOGETHER)
@pytest.mark.parametrize("optimizer", [momentum, adam, by_layer])
def test_a_group_leaves_alone_what_one_worker_leaves_alone(how: str, optimizer: Any) -> None:
    assert differ(fit(Unused, optimizer, TOGETHER[how], size=2), plain(Unused, optimizer)) < TOLERANCE


@pytest.mark.parametrize("model", [Staged, Routed])
@pytest.mark.parametrize("how", TOGETHER)
def test_gradients_that_leave_as_they_are_made_leave_alone_the_same(how: str, model: Callable[[], nn.Module]) -> None:
    """Outside virtual time they go to a table's servers during the backward pass."""
    found = fit(model, adam, TOGETHER[how], cluster=tw.Local(workers=2, processes=False))
    assert differ(found, plain(model, adam)) < TOLERANCE


EVERY: list[Strategy] = [
    tw.Synchronous(), tw.SparkNet(period=2), tw.DiLoCo(period=2), tw.EASGD(period=2), tw.EASGD(period=2, momentum=0.5),
    tw.DeepSpark(period=2), tw.MPCA(), tw.MPCA(form="gradient"), tw.ParameterTable(), tw.Relay(), tw.Relay(bits=2),
    tw.Relay(bits=8, fragments=2), tw.Auto(),
]  # fmt: skip


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_a_layer_that_nobody_uses_stays_as_it_was(strategy: Strategy) -> None:
    found, first = fit(Unused, momentum, strategy, steps=40), plain(Unused, momentum, steps=0)
    assert torch.equal(found.beside.weight, first.beside.weight)
    assert torch.equal(found.beside.bias, first.beside.bias)
    assert not torch.equal(found.first.weight, first.first.weight)


def test_stages_of_a_deep_belief_network_stay_as_they_were_learnt() -> None:
    """Contrastive divergence learns one stage after the other: a finished one takes no further step."""
    from thinwire.models.boltzmann import DBN

    learnt: dict[int, torch.Tensor] = {}
    for steps in (6, 12):
        found = tw.fit(
            lambda: DBN((6, 12, 5)), {"x": torch.sigmoid(rows()["x"])}, inputs=["x"], label=None, steps=steps,
            algorithm=tw.ContrastiveDivergence(stage_steps=6), optimizer=momentum, strategy=tw.Synchronous(),
            batch_size=ROWS // 2, cluster=tw.Simulated(workers=2, step_s=0.01), progress=False,
        )  # fmt: skip
        learnt[steps] = torch.cat([p.detach().flatten() for p in found.model.machines[0].parameters()])
    assert torch.equal(learnt[6], learnt[12])


def test_a_parameter_that_begins_to_need_a_gradient_in_a_run_is_refused() -> None:
    """It is in no vector that workers exchange: replicas would come apart in it without a word."""

    class Thawing(Unused):
        def __init__(self) -> None:
            super().__init__()
            self.passes = 0
            self.first.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.passes += 1
                self.first.requires_grad_(self.passes > TURN)
            return super().forward(x)

    with pytest.raises(Exception, match=r"'first.weight' began to require a gradient.*requires_grad"):
        fit(Thawing, momentum, tw.SparkNet(period=2))
