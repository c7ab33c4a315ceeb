from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from thinwire.errors import ConfigError
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.objectives import NamedOptimizer, NamedScheduler

SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"T_max": 8},
    "exponential": {"gamma": 0.5},
    "multistep": {"milestones": [2, 5]},
    "step": {"step_size": 3},
}


def replica(name: str, *, lr: float = 0.1, warmup: int = 0) -> TorchReplica:
    spec = TrainSpec(
        loss="mse",
        optimizer=NamedOptimizer("sgd", lr=lr),
        scheduler=NamedScheduler(name, warmup=warmup, **SCHEDULES[name]),
        scheduler_every="step",
        device="cpu",
    )
    return TorchReplica(lambda: nn.Linear(2, 1), spec)


def of(make: Any, lr: Any = 0.1) -> TorchReplica:
    """A replica whose schedule is a user's own."""
    optimizer = lambda p: torch.optim.SGD(p, lr=lr)  # noqa: E731
    spec = TrainSpec(loss="mse", optimizer=optimizer, scheduler=make, scheduler_every="step", device="cpu")
    return TorchReplica(lambda: nn.Linear(2, 1), spec)


def rates(one: TorchReplica, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(one.rates[0])
        one.advance()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_rises_evenly_and_the_schedule_begins_after_it(name: str) -> None:
    plain, warm = rates(replica(name), 8), rates(replica(name, warmup=3), 11)
    assert warm[:3] == pytest.approx([0.025, 0.05, 0.075])
    assert warm[3:] == pytest.approx(plain)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("done", [0, 2, 3, 5])
def test_who_goes_on_with_another_rate_has_what_it_would_have_had_all_along(name: str, warmup: int, done: int) -> None:
    before, after = replica(name, warmup=warmup), replica(name, lr=0.02, warmup=warmup)
    wanted = rates(replica(name, lr=0.02, warmup=warmup), 12)
    rates(before, done)
    after.load_learning(before.learning())
    assert rates(after, 12 - done) == pytest.approx(wanted[done:])


def nested(optimizer: torch.optim.Optimizer) -> Any:
    rise = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    turn = lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])
    return lr_scheduler.ChainedScheduler([turn], optimizer)


OWN: dict[str, Any] = {
    "cosine that ends above nought": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.01),
    "one cycle, which has rates of its own": lambda o: lr_scheduler.OneCycleLR(o, 0.2, 12, cycle_momentum=False),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "a function": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "one in another": nested,
}


@pytest.mark.parametrize("what", OWN)
@pytest.mark.parametrize("done", [2, 7])
def test_so_it_is_with_schedules_of_users(what: str, done: int) -> None:
    wanted = rates(of(OWN[what], 0.02), 11)
    for joins in (False, True):  # with a part of its own in the checkpoint, and without
        before, after = of(OWN[what]), of(OWN[what], 0.02)
        rates(before, done)
        if joins:
            after.load_schedule(before.schedule())
        else:
            after.load_learning(before.learning())
        assert rates(after, 11 - done) == pytest.approx(wanted[done:])


def test_a_schedule_that_follows_evaluations_goes_on_in_proportion() -> None:
    before, after = (of(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0), lr) for lr in (0.1, 0.02))
    for loss in (1.0, 2.0):
        before.end_evaluation({"val_loss": loss})
    after.load_learning(before.learning())
    assert after.rates[0] == pytest.approx(0.01)


def test_a_rate_that_is_a_tensor_may_become_a_number() -> None:
    before, after = of(None, torch.tensor(0.1)), of(None, 0.02)
    after.load_learning(before.learning())
    assert after.rates[0] == pytest.approx(0.02)
    before.load_learning(of(None, 0.02).learning())


def test_a_schedule_that_a_run_had_none_of_begins_where_it_goes_on() -> None:
    for joins in (False, True):
        before, after = of(None), replica("cosine", warmup=3)
        rates(before, 5)
        if joins:
            after.load_schedule(before.schedule())
        else:
            after.load_learning(before.learning())
        assert rates(after, 11) == pytest.approx(rates(replica("cosine", warmup=3), 11))


@pytest.mark.parametrize("warm", [True, False])
def test_a_warm_up_that_comes_or_goes_is_refused(warm: bool) -> None:
    before, after = replica("cosine", warmup=3 * warm), replica("cosine", warmup=3 * (not warm))
    rates(before, 4)
    with pytest.raises(ConfigError, match="its warm-up included"):
        after.load_learning(before.learning())


class Tabled(lr_scheduler.StepLR):
    """Holds what cannot be sent, and wants it back."""

    table: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "table": {1: 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = state.pop("table")
        super().load_state_dict(state)


def test_of_a_schedule_that_cannot_be_sent_who_joins_late_has_the_rate_of_now() -> None:
    peer, late = (of(lambda o: Tabled(o, 2)) for _ in range(2))
    rates(peer, 3)
    late.load_schedule(peer.schedule())
    assert late.rates[0] == pytest.approx(peer.rates[0]) == pytest.approx(0.01)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_who_joins_late_has_the_rates_of_the_others(name: str, done: int) -> None:
    peer, late = replica(name, warmup=3), replica(name, warmup=3)
    rates(peer, done)
    late.load_schedule(peer.schedule())
    assert late.rates[0] == pytest.approx(peer.rates[0])
    assert rates(late, 6) == pytest.approx(rates(peer, 6))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "cosine", "T_max": 8, "warmup": -1}, "0 or more"),
        ({"name": "cosine", "T_max": 8, "warmup": 2.5}, "whole number"),
        ({"name": "onecycle", "max_lr": 0.1, "total_steps": 9, "warmup": 3}, "pct_start"),
        ({"name": "plateau", "warmup": 3}, "evaluations"),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        NamedScheduler(**settings)


def test_a_replica_that_begins_anew_has_what_its_optimizer_keeps_before_the_first_step() -> None:
    """Adagrad keeps sums from the start; without them its first step would be another, or fail."""
    optimizer = lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)  # noqa: E731
    replica = TorchReplica(torch.nn.Linear(2, 2), TrainSpec(loss="mse", optimizer=optimizer))
    replica.begin_anew()
    assert [kept["sum"].unique().tolist() for kept in replica.optimizer.state.values()] == [[0.5], [0.5]]
