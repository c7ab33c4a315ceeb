"""NaN and infinity, wherever they arise: by every strategy, at any step, at one worker and at all, by both choices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.strategies import STRATEGIES

from .flawed import (
    STEPS,
    Net,
    Site,
    diverged_or_sound,
    huge_gradient,
    infinite_gradient,
    infinite_moments,
    infinite_statistics,
    nan_gradient,
    nan_loss,
    overflowing_parameters,
)
from .test_nonfinite import known

FLAWS = {
    "nan gradient": nan_gradient,
    "infinite gradient": infinite_gradient,
    "huge gradient": huge_gradient,
    "nan loss": nan_loss,
    "parameters": overflowing_parameters,
    "statistics": infinite_statistics,
    "moments": infinite_moments,
}
SEEN = {"nan gradient", "infinite gradient", "nan loss"}
"""What the worker itself sees of a step before it is taken."""
WHEN = {"first": 1, "middle": 6, "last": STEPS}
WHO = {"one": (1,), "all": (0, 1, 2, 3)}
POLICIES = ("drop", "stop")
PLACEMENTS = {"features": tw.TensorParallel(group_size=2), "planned": tw.Planned(group_size=2)}
EACH = 29
"""Of so many combinations one is tried by `make test`; it is prime, so that each value has its turn."""


def spread(*sets: Any) -> list[Any]:
    """Every combination, most of them for `make test-all` alone."""
    found = list(itertools.product(*sets))
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.long] if number % EACH else [])
        for number, case in enumerate(found)
    ]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(("name", "flaw", "when", "who", "policy"), spread(STRATEGIES, FLAWS, WHEN, WHO, POLICIES))
def test_a_run_ends_with_a_finite_model_or_an_error_that_names_a_worker(
    tmp_path: Path, name: str, flaw: str, when: str, who: str, policy: str
) -> None:
    site = Site(tw.Simulated(workers=3, step_s=0.05), FLAWS[flaw], {WHEN[when]}, WHO[who])
    error = diverged_or_sound(tmp_path, site, known(name), on_nonfinite=policy, optimizer=adam)
    if flaw in SEEN:
        assert bool(error) == (policy == "stop")


@pytest.mark.parametrize(("flaw", "when", "policy"), spread(FLAWS, WHEN, POLICIES))
def test_a_worker_without_others_does_too(tmp_path: Path, flaw: str, when: str, policy: str) -> None:
    site = Site(tw.Simulated(workers=1, step_s=0.05), FLAWS[flaw], {WHEN[when]}, (0,))
    error = diverged_or_sound(tmp_path, site, known("relay"), on_nonfinite=policy, optimizer=adam)
    if flaw in SEEN:
        assert bool(error) == (policy == "stop")


@pytest.mark.parametrize(
    ("placement", "name", "flaw", "when", "who", "policy"),
    spread(PLACEMENTS, ("synchronous", "sparknet", "relay", "easgd", "parameter_table"), FLAWS, WHEN, WHO, POLICIES),
)
def test_groups_of_workers_do_too(
    tmp_path: Path, placement: str, name: str, flaw: str, when: str, who: str, policy: str
) -> None:
    site = Site(tw.Simulated(workers=4, step_s=0.05), FLAWS[flaw], {WHEN[when]}, WHO[who])
    given: dict[str, Any] = {"model": "mlp", "optimizer": adam, "placement": PLACEMENTS[placement]}
    error = diverged_or_sound(tmp_path, site, known(name), on_nonfinite=policy, **given)
    if flaw in SEEN:
        assert bool(error) == (policy == "stop")


@pytest.mark.parametrize(
    ("codec", "name", "flaw"),
    spread(
        ("float32", "bfloat16", "int8", "int4", "sign2", "sign1"),
        ("synchronous", "sparknet", "diloco", "mpca"),
        ("huge gradient", "parameters", "nan gradient"),
    ),
)
def test_it_is_the_same_with_every_codec(tmp_path: Path, codec: str, name: str, flaw: str) -> None:
    site = Site(tw.Simulated(workers=3, step_s=0.05), FLAWS[flaw], {6, STEPS}, (1,))
    diverged_or_sound(tmp_path, site, known(name), codec=codec)


class ByRows(torch.optim.Optimizer):
    """Keeps a number for each row of a parameter, as SM3 does, and all of them once more in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
            state = self.state[parameter]
            state["rows"] = state.get("rows", torch.zeros(len(gradient))) + gradient.square().sum(1)
            state["seen"] = [state["rows"].clone()]
            scaled = 0.1 * gradient / (state["rows"].sqrt()[:, None] + 1e-3)
            parameter.sub_(scaled.view_as(parameter))


OPTIMIZERS: dict[str, Any] = {
    "one of rows": ByRows,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("flaw", ["moments", "huge gradient", "nan gradient"])
def test_no_optimizer_s_state_is_saved_that_is_not_finite(tmp_path: Path, optimizer: str, flaw: str) -> None:
    """Whatever its form: Adafactor keeps rows and columns, LBFGS lists of directions."""
    site = Site(tw.Simulated(workers=2, step_s=0.05), FLAWS[flaw], {4, 7}, (1,))
    diverged_or_sound(tmp_path, site, known("sparknet"), optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", ["adagrad", "adam with amsgrad", "rmsprop"])
@pytest.mark.parametrize("consistency", ["strict", "eventual"])
def test_what_servers_keep_beside_parameters_is_finite_or_ends_the_run(
    tmp_path: Path, optimizer: str, consistency: Any
) -> None:
    """A second moment overflows where parameters do not: nothing would ever be learnt at that place again."""
    site = Site(tw.Simulated(workers=2, step_s=0.05), huge_gradient, {6}, (1,))
    strategy = tw.ParameterTable(consistency=consistency, optimizer=OPTIMIZERS[optimizer])
    assert "keeps beside the joint model is not finite" in diverged_or_sound(tmp_path, site, strategy)


def test_a_run_goes_on_from_what_any_of_these_left(tmp_path: Path) -> None:
    site = Site(tw.Simulated(workers=2, step_s=0.05), overflowing_parameters, range(9, 1000), (0, 1))
    assert diverged_or_sound(tmp_path, site, known("sparknet"), steps=200)
    again = Site(tw.Simulated(workers=2, step_s=0.05), nan_gradient, (), ())
    assert not diverged_or_sound(tmp_path, again, known("sparknet"), steps=24, resume=str(tmp_path), model=Net)
