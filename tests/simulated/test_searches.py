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
from thinwire.replicas.searches import needs_closure
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
        r"parameter_table exchanges one gradient a step(?s:.)*use tw\.Synchronous",
        optimizer=optimizer,
        strategy="parameter_table",
    )


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


def test_a_factory_is_called_once_by_the_driver_s_trial_and_once_a_worker() -> None:
    made: list[int] = []

    def counted(parameters: Any) -> torch.optim.Optimizer:
        made.append(1)
        return torch.optim.SGD(parameters, lr=0.1)

    fit(optimizer=counted, strategy="synchronous")
    assert len(made) == 1 + 2


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


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)


def test_a_schedule_makes_no_optimizer_one_that_needs_a_closure() -> None:
    """torch's schedulers replace `step` by a function whose signature has the optimizer itself."""
    for factory, expected in ((torch.optim.SGD, False), (torch.optim.Adam, False), (torch.optim.LBFGS, True)):
        optimizer = factory([nn.Parameter(torch.zeros(1))], lr=0.1)
        assert needs_closure(optimizer) is expected
        schedule(optimizer)
        assert needs_closure(optimizer) is expected


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(tw.Synchronous(), MOMENTUM), (tw.Synchronous(), strict), (tw.ParameterTable(consistency="strict"), MOMENTUM)],
    ids=["synchronous", "synchronous, L-BFGS", "table"],
)
def test_two_workers_with_a_schedule_are_one_with_all_their_rows(strategy: Any, optimizer: Any) -> None:
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": schedule,
        "scheduler_every": "step",
        "strategy": strategy,
        "batch_size": ROWS,
    }
    alone = fit(**settings, cluster=tw.Simulated(workers=1, step_s=0.01))
    together = fit(**settings)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(together.model.state_dict()[name], value, rtol=1e-3, atol=1e-3)


# -- synchronous ------------------------------------------------------------------------------------------------------

STEPS = 3


def plain_torch(factory: Any, steps: int) -> list[torch.Tensor]:
    """The parameters that plain torch comes to with all rows in every step."""
    torch.manual_seed(0)
    plain = net()
    made = factory(plain.parameters())

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = nn.functional.cross_entropy(plain(torch.from_numpy(X)), torch.from_numpy(Y))
        loss.backward()
        return loss

    for _ in range(steps):
        made.step(closure)
    return [p.detach() for p in plain.parameters()]


class Watched:
    """Makes an optimizer, and keeps what each one made was told and where it ended."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self.told: list[list[float]] = []
        self.held: list[list[torch.Tensor]] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)
        told: list[float] = []
        made: Any = self._factory(held)
        inner = made.step

        def step(closure: Callable[[], torch.Tensor]) -> Any:
            def evaluate() -> torch.Tensor:
                found = closure()
                told.append(float(found))
                return found

            return inner(evaluate)

        made.step = step
        self.told.append(told)
        self.held.append(held)
        optimizer: torch.optim.Optimizer = made
        return optimizer

    def ended(self) -> list[torch.Tensor]:
        """The parameters of each replica that was told of the last evaluation."""
        last = max((told for told in self.told), key=len)[-1]
        ends = zip(self.told, self.held, strict=True)
        return [torch.cat([p.detach().flatten() for p in held]) for told, held in ends if told and told[-1] == last]


DISTRIBUTED: dict[str, Any] = {
    "conjugate gradients": tw.ConjugateGradient,
    "L-BFGS": functools.partial(torch.optim.LBFGS, max_iter=4),
    "L-BFGS with a line search": strict,
    "a user's own": Halving,
}
distributed = pytest.mark.parametrize("factory", DISTRIBUTED.values(), ids=DISTRIBUTED)


@distributed
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_together_are_one_with_all_their_rows(factory: Any, workers: int) -> None:
    """Five workers have nine or ten rows each: a mean that did not weigh them would show."""
    watched = Watched(factory)
    cluster = tw.Simulated(workers=workers, step_s=0.01, spread=0.3)
    run = fit(optimizer=watched, strategy="synchronous", cluster=cluster, batch_size=ROWS, steps=STEPS)
    found, expected = run.model.state_dict().values(), plain_torch(factory, STEPS)
    for value, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(value, plain, rtol=1e-3, atol=1e-3)
    told = [each for each in watched.told if each]
    assert len(told) == workers
    assert all(each == told[0] for each in told), "every worker is told the same losses, bit for bit"
    ends = watched.ended()
    assert len(ends) == workers
    assert all(torch.equal(each, ends[0]) for each in ends)


@distributed
def test_a_worker_whose_rows_are_done_takes_the_others_steps(factory: Any) -> None:
    """Of 50 rows three workers have 17, 17 and 16, in batches of four: two take one step more than the third."""
    watched = Watched(factory)
    run = tw.fit(
        net,
        (np.concatenate([X, X[:2]]), np.concatenate([Y, Y[:2]])),
        optimizer=watched,
        strategy="synchronous",
        cluster=tw.Simulated(workers=3, step_s=0.01, spread=0.3),
        batch_size=4,
        epochs=2,
        validation=(X, Y),
        evaluate_every=2,
        progress=False,
    )
    assert run.summary["complete"]
    told = [each for each in watched.told if each]
    assert all(each == told[0] for each in told)
    ends = watched.ended()
    assert len(ends) == 3
    assert all(torch.equal(each, ends[0]) for each in ends)


@pytest.mark.parametrize(
    "at_s", [0.25, 0.65, *(pytest.param(at_s, marks=pytest.mark.long) for at_s in (0.45, 0.95, 1.35))]
)
@distributed
def test_a_worker_that_is_lost_in_the_middle_of_a_step_is_replaced(factory: Any, at_s: float) -> None:
    """The others take the step again; the new one is given what they have, and decides as they do."""
    watched = Watched(factory)
    run = fit(
        optimizer=watched,
        strategy="synchronous",
        cluster=tw.Simulated(workers=3, step_s=0.1, faults=[tw.Fault(at_s=at_s, worker=1, seconds=1.0)]),
        steps=20,
        batch_size=ROWS,
        validation=(X, Y),
        evaluate_every=1,  # a state that is handed over before its publication is taken up would hold all up
    )
    assert run.summary["workers_lost"] == 1
    assert run.summary["complete"]
    ends = watched.ended()
    assert len(ends) == 3, "also the one that came back"
    assert all(torch.equal(each, ends[0]) for each in ends)
    assert run.summary["train_loss"] < 0.5


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"optimizer": strict, "strategy": "synchronous", "batch_size": 12}
    whole = fit(**settings, steps=6)
    fit(**settings, steps=3, out=str(tmp_path))
    resumed = fit(**settings, steps=6, resume=str(tmp_path))
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("given", [{"codec": "int8"}, {"strategy": tw.Synchronous(codec="bfloat16")}], ids=str)
def test_a_codec_that_rounds_gradients_is_refused(given: dict[str, Any]) -> None:
    refused(r"codec = '\w+' rounds the gradients", **({"optimizer": strict, "strategy": "synchronous"} | given))


def test_an_evaluation_takes_as_long_as_a_step() -> None:
    """Of conjugate gradients in virtual time: one evaluation for each loss that the optimizer was told."""
    watched = Watched(tw.ConjugateGradient)
    run = fit(optimizer=watched, strategy="synchronous", cluster=tw.Simulated(workers=2, step_s=1.0, latency_s=0.0))
    evaluations = max(len(each) for each in watched.told)
    assert run.summary["train_seconds"] == pytest.approx(evaluations, abs=0.5)
