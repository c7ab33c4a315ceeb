"""Optimizers that treat parameters each in a way of its own: the same under every strategy whose workers step together.

Every batch is the whole shard, so K workers that step together are one worker with all rows: plain torch, here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.strategies import Strategy

ROWS, STEPS = 48, 6
TOLERANCE = 2e-5
"""Sums are taken in another order; parameters are of the order of 0.1 to 1."""

Factory = Callable[[Any], torch.optim.Optimizer]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 3))


def frozen_first() -> nn.Module:
    made = net()
    made[0].requires_grad_(False)
    return made


def rows() -> dict[str, torch.Tensor]:
    x = torch.linspace(-2.0, 2.0, ROWS * 6).reshape(ROWS, 6).sin() * 2
    return {"x": x, "label": (x.sum(1) * 3).long() % 3}


def by_place(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    return torch.optim.SGD([{"params": held[:3], "lr": 0.3}, {"params": held[3:]}], lr=0.05, momentum=0.9)


def no_decay_on_biases(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    decayed, plain = [p for p in held if p.dim() > 1], [p for p in held if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def one_rate_of_zero(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    return torch.optim.SGD([{"params": held[:2], "lr": 0.0}, {"params": held[2:]}], lr=0.1, momentum=0.9)


def momentum_in_one_group(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    first, last = {"params": held[1::2], "momentum": 0.9, "nesterov": True}, {"params": held[::2]}
    return torch.optim.SGD([first, last], lr=0.1)


def betas_and_eps(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    first = {"params": held[:3], "betas": (0.5, 0.9), "eps": 1e-2, "amsgrad": True}
    return torch.optim.Adam([first, {"params": held[3:]}], lr=0.02)


def sums_from_the_start(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    groups = [{"params": held[:3], "lr": 0.1}, {"params": held[3:]}]
    return torch.optim.Adagrad(groups, lr=0.02, initial_accumulator_value=0.1)


def part_of_them(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9)


def damped(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)


def side_by_side(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, capturable=True)


def rate_in_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9)


OPTIMIZERS: list[Factory] = [
    by_place, no_decay_on_biases, one_rate_of_zero, momentum_in_one_group, betas_and_eps, sums_from_the_start,
    part_of_them, damped, side_by_side, fused, capturable, rate_in_a_tensor,
]  # fmt: skip
TOGETHER: dict[str, tuple[Strategy, int]] = {
    "synchronous": (tw.Synchronous(), 1),
    "table": (tw.ParameterTable(consistency="strict", tuple_size=70), 1),
    "planned": (tw.Synchronous(), 2),
    "planned table": (tw.ParameterTable(consistency="strict", tuple_size=70), 2),
}


def fit(optimizer: Factory, strategy: Strategy, size: int = 1, workers: int = 0, **changes: Any) -> nn.Module:
    workers = workers or 2 * size
    settings: dict[str, Any] = {
        "model": net, "steps": STEPS, "batch_size": ROWS // workers, "inputs": ["x"], "progress": False,
        "placement": tw.Planned(group_size=size) if size > 1 else None,
        "cluster": tw.Simulated(workers=workers, step_s=0.01),
    }  # fmt: skip
    settings |= changes
    return tw.fit(settings.pop("model"), rows(), optimizer=optimizer, strategy=strategy, **settings).model


def plain(optimizer: Factory, model: Callable[[], nn.Module] = net, steps: int = STEPS, **more: Any) -> nn.Module:
    """What torch itself comes to, with all rows in every batch."""
    torch.manual_seed(0)
    made, data = model(), rows()
    stepping = optimizer(made.parameters())
    for group in stepping.param_groups:
        group.update({"capturable": False} if "capturable" in group else {})
    moving = more["scheduler"](stepping) if "scheduler" in more else None
    for _ in range(steps):
        stepping.zero_grad()
        nn.functional.cross_entropy(made(data["x"]), data["label"]).backward()
        if "clip_norm" in more:
            nn.utils.clip_grad_norm_(made.parameters(), more["clip_norm"])
        stepping.step()
        if moving is not None:
            moving.step()
    return made


def differ(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", TOGETHER)
def test_workers_that_step_together_come_to_what_one_comes_to(how: str, optimizer: Factory) -> None:
    strategy, size = TOGETHER[how]
    alone = plain(optimizer)
    assert differ(alone, plain(optimizer, steps=0)) > 0.01, "it trains"
    assert differ(fit(optimizer, strategy, size), alone) < TOLERANCE


@pytest.mark.parametrize("optimizer", [by_place, no_decay_on_biases])
@pytest.mark.parametrize("how", TOGETHER)
def test_frozen_parameters_stay_and_count_as_places_of_the_others(how: str, optimizer: Factory) -> None:
    strategy, size = TOGETHER[how]
    found = fit(optimizer, strategy, size, model=frozen_first)
    alone = plain(optimizer, frozen_first)
    assert differ(found, alone) < TOLERANCE
    assert torch.equal(found[0].weight, plain(optimizer, frozen_first, steps=0)[0].weight)


@pytest.mark.parametrize("how", TOGETHER)
def test_each_group_follows_its_own_schedule(how: str) -> None:
    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step])

    strategy, size = TOGETHER[how]
    found = fit(by_place, strategy, size, scheduler=halve, scheduler_every="step")
    assert differ(found, plain(by_place, scheduler=halve)) < TOLERANCE


def test_a_table_with_an_optimizer_of_its_own_knows_its_groups() -> None:
    found = fit(damped, tw.ParameterTable(consistency="strict", tuple_size=70, optimizer=no_decay_on_biases))
    assert differ(found, plain(no_decay_on_biases)) < TOLERANCE


def test_an_optimizer_of_another_model_s_parameters_is_refused() -> None:
    other = net()
    with pytest.raises(Exception, match="from the parameters that the function is given"):
        fit(lambda parameters: torch.optim.SGD(other.parameters(), lr=0.1), tw.SparkNet())


def factored(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


class Normalised(torch.optim.SGD):
    """Takes steps of one length: each number's step depends on all the others of its tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


@pytest.mark.parametrize("optimizer", [factored, lambda p: Normalised(p, lr=0.1)], ids=["adafactor", "normalised"])
@pytest.mark.parametrize("how", ["table", "planned", "planned table"])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_where_tensors_are_cut(
    how: str, optimizer: Factory
) -> None:
    strategy, size = TOGETHER[how]
    with pytest.raises(ConfigError, match=r"steps the numbers of a tensor together.*Adam"):
        fit(optimizer, strategy, size)


def test_an_optimizer_that_looks_at_whole_tensors_works_on_whole_replicas() -> None:
    assert differ(fit(factored, tw.Synchronous()), plain(factored)) < TOLERANCE


def test_one_that_keeps_other_numbers_is_refused_with_a_table_before_a_worker_starts() -> None:
    with pytest.raises(ConfigError, match="NAdam keeps 'mu_product'"):
        fit(lambda p: torch.optim.NAdam(p, lr=0.01), tw.ParameterTable())


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Rprop])
def test_an_optimizer_that_steps_each_number_alone_may_keep_what_it_wants_in_a_group(optimizer: Factory) -> None:
    assert differ(fit(optimizer, tw.Synchronous(), 2), plain(optimizer)) < 10 * TOLERANCE


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)


@pytest.mark.parametrize("how", ["synchronous", "planned"])
def test_a_momentum_that_cycles_cycles_for_all(how: str) -> None:
    strategy, size = TOGETHER[how]
    found = fit(damped, strategy, size, scheduler=cycle, scheduler_every="step")
    assert differ(found, plain(damped, scheduler=cycle)) < TOLERANCE


def test_a_momentum_that_cycles_is_refused_with_a_table() -> None:
    with pytest.raises(ConfigError, match=r"OneCycleLR changes the momentum.*cycle_momentum=False"):
        fit(damped, tw.ParameterTable(consistency="strict"), scheduler=cycle, scheduler_every="step")


@pytest.mark.parametrize("how", ["synchronous", "planned"])
def test_a_norm_is_clipped_over_all_parts_of_the_mean_gradient(how: str) -> None:
    strategy, size = TOGETHER[how]
    found = fit(by_place, strategy, size, clip_norm=0.05)
    assert differ(found, plain(by_place, clip_norm=0.05)) < TOLERANCE
    assert differ(found, plain(by_place)) > 100 * TOLERANCE


def test_a_solver_that_clips_a_norm_over_all_tensors_is_refused_where_workers_hold_some_of_them() -> None:
    from thinwire.caffe.solver import Settings, SolverFactory

    solver = SolverFactory(Settings(base_lr=0.1, clip_gradients=0.05))
    for placement in (tw.Planned(group_size=2), tw.Pipeline(group_size=2)):
        with pytest.raises(ConfigError, match=r"CaffeSolver steps .* together, and .* spreads it over workers"):
            fit(solver, tw.Synchronous(), cluster=tw.Local(workers=2), placement=placement)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_norm_that_nobody_knows_is_refused(workers: int) -> None:
    for strategy in (tw.ParameterTable(consistency="strict"), tw.ParameterTable(groups=1)):
        with pytest.raises(ConfigError, match=r"train\.clip_norm.*Synchronous"):
            fit(by_place, strategy, workers=workers, clip_norm=0.05)
