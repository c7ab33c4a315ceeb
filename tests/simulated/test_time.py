"""Runs that are given time instead of epochs, and what fast workers do while slow ones have rows left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.strategies import strategy

RANDOM = np.random.default_rng(0)
ROWS = 240
DATA = {"x": RANDOM.normal(size=(ROWS, 4)).astype(np.float32), "label": RANDOM.integers(0, 3, ROWS)}
STEP_S = 0.1
LINK = {"link": "1gbit", "step_s": STEP_S}


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def run(strategy: Any, *, workers: int = 2, slow: dict[int, float] | None = None, **settings: Any) -> tw.Result:
    cluster = tw.Simulated(workers=workers, slow=slow or {}, **LINK)
    given: dict[str, Any] = {"batch_size": 10, "strategy": strategy, "cluster": cluster, "progress": False}
    return tw.fit(linear, DATA, **(given | settings))


@pytest.mark.parametrize(
    "name", ["synchronous", "sparknet", "diloco", "easgd", "deepspark", "parameter_table", "mpca", "relay", "auto"]
)
def test_a_run_ends_after_its_seconds_of_training_with_a_whole_model(name: str) -> None:
    knobs = {"period": 4} if name in ("sparknet", "diloco", "easgd", "deepspark") else {}
    result = run(strategy(name, knobs), seconds=20, validation=0.2)
    summary = result.summary
    assert summary["complete"]
    assert summary["reason"] == "20 s of training are over"
    assert 20 <= summary["train_seconds"] <= 22
    assert 0.75 * 200 <= summary["steps"] <= 220
    assert summary["epochs"] > 10, "without epochs there is no other end"
    assert summary["val_loss"] is not None


def test_one_worker_alone_ends_after_its_seconds() -> None:
    assert 20 <= run(tw.SparkNet(), workers=1, seconds=20).summary["train_seconds"] <= 21


@pytest.mark.parametrize("more", [{"epochs": 2}, {"steps": 24}])
def test_whichever_comes_first_ends_the_run(more: dict[str, int]) -> None:
    summary = run(tw.SparkNet(period=4), seconds=500, **more).summary
    assert (summary["steps"], summary["rows"], summary["reason"]) == (24, 480, "all rows done")


def test_the_seconds_before_a_resume_count(tmp_path: Path) -> None:
    first = run(tw.SparkNet(period=4), seconds=10, out=str(tmp_path), checkpoint_every=8).summary
    second = run(tw.SparkNet(period=4), seconds=15, out=str(tmp_path), resume=str(tmp_path)).summary
    assert 9 <= first["train_seconds"] <= 12
    assert 4 <= second["train_seconds"] <= 7
    assert second["steps"] > first["steps"]


@pytest.mark.parametrize("given", [0, -1, "10", True, float("nan")])
def test_seconds_that_are_no_time_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="seconds = "):
        run(tw.SparkNet(), seconds=given)


BY_TIME = tw.SparkNet(period_s=1.0)


def test_given_time_no_worker_waits_for_a_slow_one_at_the_end() -> None:
    summary = run(BY_TIME, workers=3, slow={1: 4.0}, seconds=30).summary
    assert summary["busy"] > 0.85
    assert summary["train_seconds"] <= 32


def test_workers_that_have_done_their_epochs_go_on_until_a_slow_one_has_done_its_own() -> None:
    summary = run(BY_TIME, workers=3, slow={1: 4.0}, epochs=4).summary
    assert summary["complete"]
    assert summary["reason"] == "all rows done"
    assert summary["busy"] > 0.85
    assert summary["rows"] > 1.8 * 4 * ROWS, "two of three workers do four times their epochs"


def test_workers_of_one_speed_do_exactly_their_epochs() -> None:
    summary = run(BY_TIME, workers=3, epochs=4).summary
    assert (summary["rows"], summary["reason"]) == (4 * ROWS, "all rows done")


def test_rounds_by_steps_leave_every_worker_its_own_epochs() -> None:
    assert run(tw.SparkNet(period=4), slow={1: 4.0}, epochs=4).summary["rows"] == 4 * ROWS


def test_steps_are_the_most_that_a_fast_worker_makes() -> None:
    summary = run(BY_TIME, slow={1: 4.0}, epochs=40, steps=30).summary
    assert summary["steps"] <= 30


def test_a_worker_lost_while_others_go_on_past_their_epochs_comes_back_and_does_its_rows() -> None:
    cluster = tw.Simulated(workers=3, slow={1: 4.0}, faults=[tw.Fault(at_s=12.0, worker=1)], **LINK)
    summary = run(BY_TIME, cluster=cluster, epochs=4).summary
    assert summary["complete"]
    assert summary["workers_lost"] == 1
    assert summary["rows"] >= 4 * ROWS


def test_a_cosine_that_ends_with_the_run_stays_low_for_those_who_go_on() -> None:
    from thinwire.replicas.objectives import NamedOptimizer, NamedScheduler

    optimizer = NamedOptimizer("sgd", lr=1.0)(linear().parameters())
    for warmup in (0, 2):
        schedule = NamedScheduler("cosine", warmup=warmup).over(6)(optimizer)
        rates = []
        for _ in range(12):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert max(rates[6:]) == pytest.approx(0.0, abs=1e-6)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 1.0
