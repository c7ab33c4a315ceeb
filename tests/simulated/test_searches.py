"""Optimizers whose steps evaluate loss and gradient again: right, or refused before a worker starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.strategies import STRATEGIES

ROWS, CLASSES = 48, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = (X @ RANDOM.standard_normal((4, CLASSES))).argmax(1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Halving(torch.optim.Optimizer):
    """A user's own: gradient descent whose step is halved until the loss falls."""

    def __init__(self, parameters: Any, lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Callable[[], torch.Tensor]) -> Any:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure().item()
        start = [p.detach().clone() for p in held]
        downhill = [p.grad.clone() for p in held if p.grad is not None]
        rate = self.param_groups[0]["lr"]
        for _ in range(20):
            with torch.no_grad():
                for parameter, before, slope in zip(held, start, downhill, strict=True):
                    parameter.copy_(before - rate * slope)
            with torch.enable_grad():
                if closure().item() < loss:
                    return loss
            rate /= 2
        with torch.no_grad():
            for parameter, before in zip(held, start, strict=True):
                parameter.copy_(before)
        return loss


class ByKeyword(Halving):
    def step(self, *, closure: Callable[[], torch.Tensor]) -> Any:  # type: ignore[override]
        return super().step(closure)


class ByAnotherName(Halving):
    def step(self, evaluate: Callable[[], torch.Tensor]) -> Any:  # type: ignore[override]
        return super().step(evaluate)


def strict(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=4, history_size=5, line_search_fn="strong_wolfe")


def of_the_second_parameter(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(list(parameters)[1:], max_iter=3)


SEARCHES: dict[str, Any] = {
    "conjugate_gradient": "conjugate_gradient",
    "lbfgs": "lbfgs",
    "ConjugateGradient": tw.ConjugateGradient,
    "a lambda": lambda p: tw.ConjugateGradient(p, lr=0.1, iterations=2),
    "a partial": functools.partial(torch.optim.LBFGS, max_iter=3),
    "LBFGS": torch.optim.LBFGS,
    "strong Wolfe": strict,
    "one that asks for more parameters than one": of_the_second_parameter,
    "a user's own": Halving,
    "a user's own, by keyword": ByKeyword,
    "a user's own, by another name": ByAnotherName,
}
every = pytest.mark.parametrize("optimizer", SEARCHES.values(), ids=SEARCHES)


def fit(**changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "cluster": tw.Simulated(workers=2, step_s=0.01),
        "batch_size": 8,
        "steps": 4,
        "progress": False,
    }
    return tw.fit(net, (X, Y), **(settings | changes))


def refused(match: str, **changes: Any) -> None:
    log: list[events.Event] = []
    with pytest.raises(ConfigError, match=match):
        fit(callbacks=[log.append], **changes)
    assert not log, "no worker has started"


@every
def test_a_table_is_refused_an_optimizer_that_needs_a_closure(optimizer: Any) -> None:
    refused(
        "parameter_table exchanges one gradient a step(?s:.)*use a strategy that",
        optimizer=optimizer,
        strategy="parameter_table",
    )


@every
def test_synchronous_is_refused_an_optimizer_that_needs_a_closure(optimizer: Any) -> None:
    refused("synchronous exchanges one gradient a step", optimizer=optimizer, strategy="synchronous")


def test_a_table_whose_own_optimizer_needs_a_closure_is_refused() -> None:
    refused("LBFGS", strategy=tw.ParameterTable(optimizer=torch.optim.LBFGS))


@every
@pytest.mark.parametrize("strategy", [tw.SparkNet(period=2), tw.Synchronous()], ids=str)
def test_a_placement_is_refused_an_optimizer_that_needs_a_closure(optimizer: Any, strategy: Any) -> None:
    refused(
        r"Planned spreads one pass over 2 workers(?s:.)*placement=tw\.Whole\(\)",
        optimizer=optimizer,
        strategy=strategy,
        placement=tw.Planned(group_size=2),
    )


def test_a_pull_by_the_gradient_is_refused_since_an_evaluation_would_drop_it() -> None:
    refused("mpca adds a term to the gradient", optimizer=strict, strategy=tw.MPCA(form="gradient"))
    fit(optimizer=strict, strategy=tw.MPCA())


@pytest.mark.parametrize("strategy", ["sparknet", "relay"])
def test_a_limit_to_the_norm_is_refused_since_an_evaluation_would_drop_it(strategy: str) -> None:
    refused(r"clip_norm = 0\.5", optimizer=strict, strategy=strategy, clip_norm=0.5)


@every
def test_strategies_that_exchange_parameters_take_every_such_optimizer(optimizer: Any) -> None:
    fit(optimizer=optimizer, strategy=tw.SparkNet(period=2))


@pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.subject == "parameters"])
def test_every_strategy_that_exchanges_parameters_takes_l_bfgs(name: str) -> None:
    assert fit(optimizer=strict, strategy=name).summary["complete"]


@every
def test_an_optimizer_that_needs_a_closure_is_not_taken_for_one_that_does_not(optimizer: Any) -> None:
    """Its model after two steps is the one that plain torch comes to with the same rows in another order."""
    alone = {"cluster": tw.Simulated(workers=1, step_s=0.01), "batch_size": ROWS, "steps": 2}
    run = fit(optimizer=optimizer, strategy="sparknet", **alone)
    torch.manual_seed(0)
    plain = net()
    factory = {
        "conjugate_gradient": lambda p: tw.ConjugateGradient(p, lr=0.01),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01),
    }
    made = factory.get(optimizer, optimizer)(plain.parameters())  # type: ignore[call-overload]

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = nn.functional.cross_entropy(plain(torch.from_numpy(X)), torch.from_numpy(Y))
        loss.backward()
        return loss

    for _ in range(2):
        made.step(closure=closure) if optimizer is ByKeyword else made.step(closure)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-3, atol=1e-3)
