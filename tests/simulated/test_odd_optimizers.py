"""Optimizers that are unlike torch's own: they step as in one process, or are refused before a worker starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.rules.optimizer import FlatOptimizer, hidden_by

RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.standard_normal((60, 4)).astype("f4"), "label": RANDOM.integers(0, 3, 60)}
TABLE = {"strategy": tw.ParameterTable(consistency="strict")}
PLACED = {"strategy": tw.Synchronous(), "placement": tw.Planned(group_size=2)}
WHOLE = {"strategy": tw.Synchronous()}


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        super().__init__([first, *others], {"lr": 0.1})
        self.inner = [torch.optim.SGD([first], lr=0.1), torch.optim.Adam(others, lr=0.1)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()


class Counting(torch.optim.SGD):
    """It counts its steps beside its state."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = self.count + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step()


class Noisy(torch.optim.SGD):
    """Gradient descent with noise, as samplers have it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def frozen_first(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    first.requires_grad_(False)
    return torch.optim.SGD(others, lr=0.1)


def twice(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    with pytest.warns(UserWarning, match="duplicate"):
        return torch.optim.SGD([*held, held[0]], lr=0.1)


def refused(optimizer: Any, told: str, **arguments: Any) -> None:
    log: list[events.Event] = []
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        tw.fit(
            lambda: nn.Linear(4, 3),
            ROWS,
            optimizer=optimizer,
            cluster=tw.Simulated(workers=4, step_s=0.01),
            steps=2,
            progress=False,
            callbacks=[log.append],
            **arguments,
        )
    assert not log, "refused before anything runs"


@pytest.mark.parametrize("where", [TABLE, PLACED], ids=["table", "placement"])
def test_an_optimizer_of_optimizers_is_refused_where_others_step_parts_of_the_model(where: dict[str, Any]) -> None:
    refused(Both, "Both steps by another optimizer, 'inner', inside it.*tw.Synchronous", **where)


def test_an_optimizer_that_learns_beside_its_state_is_refused_where_servers_step_pieces() -> None:
    refused(Counting, r"Counting keeps 'count' outside its state.*self\.state\[parameter\]", **TABLE)


def test_replicas_are_not_stepped_jointly_by_an_optimizer_that_learns_beside_its_state() -> None:
    assert "outside its state" in FlatOptimizer(Counting, Counting([nn.Parameter(torch.zeros(1))])).why_not_in_pieces


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_an_optimizer_of_torch_hides_nothing(kind: Any) -> None:
    assert not hidden_by(FlatOptimizer(kind, kind([nn.Parameter(torch.zeros(1))])))


def test_an_optimizer_that_draws_noise_is_refused_where_replicas_take_equal_steps() -> None:
    refused(lambda p: Noisy(p, lr=0.1), "Noisy draws random numbers as it steps.*tw.SparkNet", **WHOLE)


class Decaying:
    """A user's schedule, of the weight decay."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] += 0.1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("where", [TABLE, {}, {"strategy": tw.Relay(sends="gradients")}], ids=["table", "auto", "sent"])
def test_a_schedule_of_what_those_that_step_do_not_hear_of_is_refused(where: dict[str, Any]) -> None:
    refused(torch.optim.Adam, "Decaying changes weight_decay, and what steps", scheduler=Decaying, **where)


@pytest.mark.parametrize("where", [WHOLE, TABLE, PLACED, {}], ids=["together", "table", "placement", "Relay"])
@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (frozen_first, "changes which parameters require a gradient.*where the model is made"),
        (twice, "SGD holds a parameter twice"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "Adam has differentiable = True"),
        (lambda p: torch.optim.SGD(p, lr=-1.0), "optimizer fails with ValueError: Invalid learning rate"),
        (lambda p: [torch.optim.SGD(p, lr=0.1)], "optimizer gave a list"),
    ],
    ids=["freezes", "twice", "differentiable", "rate below 0", "a list"],
)
def test_an_optimizer_that_no_worker_could_step_with_is_refused(
    optimizer: Any, told: str, where: dict[str, Any]
) -> None:
    refused(optimizer, told, **where)
