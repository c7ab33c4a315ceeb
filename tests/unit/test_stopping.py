from __future__ import annotations

import math

import numpy as np
import pytest
from torch import nn

import thinwire as tw
from thinwire.coordinator.stopping import EarlyStopping, Target, Verdict, smaller_is_better
from thinwire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "metric", "at_least", "value"),
    [
        ("val_accuracy >= 0.97", "val_accuracy", True, 0.97),
        ("val_loss<=1e-3", "val_loss", False, 1e-3),
        (" val_mae < .5 ", "val_mae", False, 0.5),
        ("val_score > -2", "val_score", True, -2.0),
    ],
)
def test_a_target_is_read(text: str, metric: str, at_least: bool, value: float) -> None:
    assert Target.parse(text) == Target(metric, at_least, value)


@pytest.mark.parametrize("text", ["", "val_loss", "val_loss == 3", ">= 3", "a b >= 3", "val_loss >= "])
def test_a_target_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="until"):
        Target.parse(text)


@pytest.mark.parametrize("text", ["val_loss <= e", "val_loss <= 1.2.3", "val_loss <= --1", "val_loss <= ."])
def test_a_target_whose_number_is_none_is_refused_as_a_target(text: str) -> None:
    with pytest.raises(ConfigError, match="until"):
        Target.parse(text)


def test_a_target_is_reached_on_its_own_side_only() -> None:
    target = Target.parse("val_accuracy >= 0.9")
    assert target.reached({"val_accuracy": 0.9})
    assert not target.reached({"val_accuracy": 0.89})
    assert not target.reached({"val_accuracy": math.nan})
    assert not target.reached({})


def test_patience_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="patience"):
        EarlyStopping(patience=0)


def test_it_stops_after_so_many_evaluations_without_improvement() -> None:
    verdict = Verdict(EarlyStopping(patience=2), None)
    found = [verdict.judge({"val_loss": loss}) for loss in (1.0, 0.5, 0.6, 0.4, 0.4, 0.5)]
    assert [best for best, _ in found] == [True, True, False, True, False, False]
    assert [reason is not None for _, reason in found] == [False] * 5 + [True]
    assert verdict.best == 0.4


def test_accuracy_is_better_when_larger_and_a_mode_overrules() -> None:
    upward = Verdict(EarlyStopping(metric="val_accuracy", patience=1), None)
    assert upward.judge({"val_accuracy": 0.5})[0]
    assert upward.judge({"val_accuracy": 0.6})[0]
    assert upward.judge({"val_accuracy": 0.5})[1]
    downward = Verdict(EarlyStopping(metric="val_accuracy", mode="min"), None)
    downward.judge({"val_accuracy": 0.5})
    assert downward.judge({"val_accuracy": 0.4})[0]


def test_an_improvement_below_min_delta_is_none() -> None:
    verdict = Verdict(EarlyStopping(patience=1, min_delta=0.1), None)
    verdict.judge({"val_loss": 1.0})
    best, reason = verdict.judge({"val_loss": 0.95})
    assert not best
    assert reason is not None


def test_a_metric_that_is_not_a_number_is_never_the_best() -> None:
    verdict = Verdict(EarlyStopping(patience=5), None)
    assert not verdict.judge({"val_loss": math.nan})[0]
    assert verdict.judge({"val_loss": 1.0})[0]


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are() -> None:
    verdict = Verdict(EarlyStopping(metric="val_f1"), None)
    with pytest.raises(ConfigError, match=r"val_f1.*val_loss"):
        verdict.judge({"val_loss": 1.0})


def test_a_target_ends_the_run_even_when_it_is_not_the_best_so_far() -> None:
    verdict = Verdict(None, Target.parse("val_accuracy >= 0.9"))
    assert verdict.judge({"val_accuracy": 0.8, "val_loss": 0.1}) == (True, None)
    best, reason = verdict.judge({"val_accuracy": 0.95, "val_loss": 0.2})
    assert not best
    assert reason is not None
    assert "val_accuracy >= 0.9" in reason


def test_a_verdict_goes_on_from_its_state() -> None:
    verdict = Verdict(EarlyStopping(patience=2), None)
    for loss in (1.0, 0.5, 0.7):
        verdict.judge({"val_loss": loss})
    again = Verdict(EarlyStopping(patience=2), None)
    again.load(verdict.state())
    assert again.judge({"val_loss": 0.6}) == verdict.judge({"val_loss": 0.6})
    assert again.state() == verdict.state()


RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(96, 3)).astype(np.float32)
ROWS = {"x": POINTS, "label": (POINTS[:, 0] > 0).astype(np.int64)}


def run(**arguments: object) -> tw.Result:
    options = {"epochs": 40, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.5}} | arguments
    cluster = tw.Simulated(workers=2, step_s=0.01)
    return tw.fit(lambda: nn.Linear(3, 2), ROWS, cluster=cluster, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("until", "told"),
    [
        ("val_acuracy >= 0.5", "'val_acuracy'.*Did you mean 'val_accuracy'"),
        ("accuracy >= 0.5", "'accuracy'.*Did you mean 'val_accuracy'"),
        ("val_mae <= 0.5", "'val_mae', which this run does not measure.*metrics="),
        ("grad_norm <= 0.5", "'grad_norm', which this run does not measure"),
        ("trian_loss <= 0.5", "Did you mean 'train_loss'"),
        ("val_accuracy >= 97", "cannot be reached: val_accuracy is a share"),
    ],
)
def test_a_target_that_would_never_be_reached_is_refused(until: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"until.*{told}"):
        run(until=until, validation=0.25)


def test_a_target_on_validation_rows_needs_some() -> None:
    with pytest.raises(ConfigError, match="until needs 'val_loss' on validation rows, and the run has none"):
        run(until="val_loss <= 0.5")


def test_early_stopping_on_a_metric_that_is_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stop names 'val_acc', .*Did you mean 'val_accuracy'"):
        run(stop=tw.EarlyStopping(metric="val_acc"), validation=0.25)


@pytest.mark.parametrize("name", ["train_loss", "loss"])
@pytest.mark.parametrize("strategy", [tw.Synchronous(), tw.Relay(), tw.SparkNet(period=3)], ids=repr)
def test_a_target_on_the_training_loss_ends_the_run_without_validation_rows(name: str, strategy: tw.Strategy) -> None:
    result = run(until=f"{name} <= 0.3", strategy=strategy)
    assert result.summary["reason"] == "target reached: train_loss <= 0.3"
    assert result.summary["epochs"] < 40
    assert result.summary["train_loss"] <= 0.35


def test_early_stopping_may_watch_the_training_loss() -> None:
    stop = tw.EarlyStopping(metric="train_loss", patience=2, min_delta=0.5)
    result = run(stop=stop, validation=0.25)
    assert "train_loss has not improved" in result.summary["reason"]
    assert smaller_is_better("train_loss")
