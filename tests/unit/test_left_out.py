"""Validation rows that no metric counts are told of, in the event, in the summary and at the end of a command."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.cli.tables import summary_table
from thinwire.coordinator.evaluations import Evaluations
from thinwire.coordinator.outcome import Outcome
from thinwire.coordinator.stopping import Verdict
from thinwire.protocol.messages import Evaluated

RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.normal(size=(120, 4)).astype(np.float32), "label": RANDOM.integers(0, 2, 120)}


def run(*faults: tw.Fault, log: list[Any], **arguments: Any) -> tw.Result:
    cluster = tw.Simulated(workers=3, step_s=0.1, faults=faults, max_restarts=0)
    return tw.fit(
        lambda: nn.Linear(4, 2), ROWS, epochs=20, batch_size=5, cluster=cluster, callbacks=[log.append],
        **({"validation": 0.25} | arguments),
    )  # fmt: skip


def test_rows_of_a_worker_that_was_lost_are_said_to_be_left_out(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log: list[Any] = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        result = run(tw.Fault(at_s=5.0, worker=2), log=log, restore_best=True)
    assert (result.summary["validation_rows"], result.summary["left_out"]) == (20, 10)
    evaluated = [event for event in log if isinstance(event, events.Evaluated)]
    assert [evaluated[0].left_out, evaluated[-1].left_out] == [0, 10]
    assert caplog.text.count("10 are left out") == 1, "the worker stays away for many evaluations"
    assert sum(event.left_out == 10 for event in evaluated) > 3
    summary_table(result.summary)
    assert "20 of 30 rows" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("share", [0.25, 0.01], ids=["some rows", "the only row"])
def test_the_driver_evaluates_the_rows_of_a_worker_that_was_lost(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    held = {"x": ROWS["x"][:30], "label": ROWS["label"][:30]}
    if share < 0.1:
        held = {name: values[:1] for name, values in held.items()}
    lost = [tw.Fault(at_s=5.0, worker=0)]  # it holds the only row
    log: list[Any] = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        result = run(*lost, log=log, validation=held)
    rows = len(held["label"])
    assert (result.summary["validation_rows"], result.summary["left_out"]) == (rows, 0)
    assert f"the driver has evaluated all {rows} validation rows" in caplog.text
    output = result.model(torch.from_numpy(held["x"])).detach()
    wanted = nn.functional.cross_entropy(output, torch.from_numpy(held["label"])).item()
    assert result.summary["val_loss"] == pytest.approx(wanted, rel=1e-5)
    accuracy = (output.argmax(1).numpy() == held["label"]).mean()
    assert result.summary["val_accuracy"] == pytest.approx(accuracy)


def test_the_driver_computes_metrics_of_all_rows_from_their_sums() -> None:
    result = run(tw.Fault(at_s=5.0, worker=2), log=[], metrics=["f1", "auc"])
    assert result.summary["left_out"] == 0
    assert 0 <= result.summary["val_f1"] <= 1
    assert 0 <= result.summary["val_auc"] <= 1


def test_nothing_is_left_out_of_a_run_without_losses() -> None:
    result = run(log=[])
    assert (result.summary["validation_rows"], result.summary["left_out"]) == (30, 0)


def test_an_evaluation_of_no_rows_leaves_what_was_measured_before() -> None:
    evaluations, outcome = Evaluations(Verdict(None, None)), Outcome()
    told: dict[str, Any] = {"attempt": 0, "steps": 4, "done": 8}
    measured, nothing = {"val_loss": 3.0}, dict[str, float]()
    evaluations.hear(0, Evaluated(number=1, sums=measured, weights={"val_loss": 6.0}, rows=6, **told))
    evaluations.hear(0, Evaluated(number=2, sums=nothing, weights=nothing, rows=0, **told))
    for judged in evaluations.ready({0}, {}, 8, None, 6):
        outcome.record(judged.event)
    assert outcome.metrics == {"val_loss": 0.5}
    assert (outcome.validation_rows, outcome.left_out) == (6, 0)
