"""Schedules whose lengths are shares of the run, a pull chosen from what was measured, and runs that end too early."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.events import Event, SettingChanged
from thinwire.rules.mpca import measured_pull

RANDOM = np.random.default_rng(0)
SIZE = 4096
DATA = {"x": RANDOM.normal(size=(64, SIZE)).astype(np.float32), "label": RANDOM.integers(0, 2, 64)}
MODEL_BYTES = 4 * (2 * SIZE + 2)
STEP_S = 0.1


def linear() -> nn.Module:
    return nn.Linear(SIZE, 2)


def run(strategy: Any, steps: int, *, exchange_steps: float = 12.0, **settings: Any) -> tuple[tw.Result, list[Event]]:
    """Two workers whose exchange of the whole model takes so many steps."""
    link = f"{8 * MODEL_BYTES / (exchange_steps * STEP_S) / 1e3:.3f}kbit"
    seen: list[Event] = []
    cluster = tw.Simulated(workers=2, step_s=STEP_S, link=link, latency_s=1e-5)
    given: dict[str, Any] = {"batch_size": 8, "cluster": cluster, "steps": steps, "progress": False}
    return tw.fit(
        linear, DATA, strategy=strategy, callbacks=[lambda e: seen.append(e) and None], **(given | settings)
    ), seen


def settings_of(seen: list[Event]) -> list[dict[str, Any]]:
    return [dict(event.setting) for event in seen if isinstance(event, SettingChanged)]


@pytest.mark.parametrize("exchange_steps", [12.0, 60.0])
def test_the_pull_is_chosen_from_the_steps_that_an_exchange_takes(exchange_steps: float) -> None:
    result, seen = run(tw.MPCA(pull="auto"), 600, exchange_steps=exchange_steps)
    pull = settings_of(seen)[-1]["pull"]
    wanted = measured_pull(exchange_steps)
    assert wanted / 1.6 <= pull <= wanted * 1.6
    assert f"pull {pull:.2g}" in result.summary["choice"]


def test_a_pull_that_is_given_stays() -> None:
    _, seen = run(tw.MPCA(pull=0.02), 100)
    assert not settings_of(seen)


def test_lengths_that_are_shares_of_the_run_follow_its_cycles() -> None:
    shares = tw.MPCA(pull_cycles=0.2, lookahead_cycles=0.2, blend_cycles=0.5)
    for steps in (300, 1200):
        result, seen = run(shares, steps)
        cycles = result.summary["rounds"] / 3
        told = settings_of(seen)[-1]
        assert told["cycles"] == pytest.approx(cycles, rel=0.6)
        ruled = shares.under(tw.strategies.Setting(**told))
        assert (ruled.pull_cycles, ruled.blend_cycles) == (round(0.2 * told["cycles"]), round(0.5 * told["cycles"]))
        assert result.summary["warnings"] == []


def test_a_run_that_ends_before_its_strategy_s_schedules_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        result, _ = run(tw.MPCA(pull_cycles=500), 150)
    (told,) = result.summary["warnings"]
    assert "exchange cycles, before its schedules did: MPCA.pull_cycles = 500" in told
    assert told in caplog.text
    long, _ = run(tw.MPCA(free_cycles=1, pull_cycles=2, lookahead_cycles=2, blend_cycles=2), 300)
    assert long.summary["warnings"] == []


@pytest.mark.parametrize("knob", ["pull_cycles", "lookahead_cycles", "blend_cycles"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "20", True])
def test_lengths_that_are_neither_cycles_nor_shares_are_refused(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"MPCA.{knob} = .*a share of the run above 0 and below 1"):
        tw.MPCA(**{knob: value})


def rates(scheduler: dict[str, Any], **settings: Any) -> list[float]:
    """Rates of each step of one worker."""
    found: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found.append(self.param_groups[0]["lr"])
            return super().step(closure)

    data = {name: values[:, :4] if values.ndim == 2 else values for name, values in DATA.items()}
    cluster = tw.Simulated(workers=1, step_s=STEP_S)
    tw.fit(
        lambda: nn.Linear(4, 2),
        data,
        optimizer=lambda p: Noting(p, lr=1.0),
        scheduler=scheduler,
        strategy=tw.SparkNet(),
        cluster=cluster,
        batch_size=8,
        progress=False,
        **settings,
    )
    return found


def test_milestones_and_warm_up_are_shares_of_the_run() -> None:
    given = {"name": "multistep", "milestones": [0.5, 0.75], "gamma": 0.1, "every": "step"}
    for steps in (20, 40):
        found = rates(given, steps=steps)
        assert [round(rate, 6) for rate in found] == (
            [1.0] * (steps // 2) + [0.1] * (steps // 4) + [0.01] * (steps // 4)
        )
    risen = rates(given | {"warmup": 0.2}, steps=20)
    assert risen[:4] == sorted(risen[:4])
    assert [round(rate, 6) for rate in risen[4:]] == [1.0] * 6 + [0.1] * 5 + [0.01] * 5


def test_a_step_size_and_a_cosine_are_shares_of_the_epochs() -> None:
    found = rates({"name": "step", "step_size": 0.5, "gamma": 0.1}, epochs=4)
    assert [round(rate, 6) for rate in found[::8]] == [1.0, 1.0, 0.1, 0.1]
    found = rates({"name": "cosine", "T_max": 0.5}, epochs=8)
    assert found[4 * 8] == found[-1] == pytest.approx(0.0, abs=1e-9)


def test_shares_of_a_run_whose_length_is_not_said_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'step' has lengths that are shares of the run.*epochs"):
        rates({"name": "step", "step_size": 0.5}, seconds=10)
    with pytest.raises(ConfigError, match=r"shares of the run, and how many steps"):
        rates({"name": "step", "step_size": 0.5, "every": "step"}, epochs=2)


def test_a_learning_rate_s_schedule_that_is_longer_than_the_run_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        rates({"name": "multistep", "milestones": [5, 30]}, epochs=10)
    assert "the run of 10 epochs ends before its schedule: train.scheduler.milestones = [5, 30]" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "thinwire"):
        rates({"name": "multistep", "milestones": [5, 9]}, epochs=10)
        rates({"name": "cosine"}, epochs=3)
    assert "ends before its schedule" not in caplog.text
