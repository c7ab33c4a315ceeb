from __future__ import annotations

from typing import Any

import pytest
from torch import nn

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


def rates(one: TorchReplica, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(one.rate)
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


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_who_joins_late_has_the_rates_of_the_others(name: str, done: int) -> None:
    peer, late = replica(name, warmup=3), replica(name, warmup=3)
    rates(peer, done)
    late.load_schedule(peer.schedule())
    assert late.rate == pytest.approx(peer.rate)
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
