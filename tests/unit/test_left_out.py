"""Validation rows that no metric counts are told of, in the event, in the summary and at the end of a command."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
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


def run(*faults: tw.Fault, log: list[Any]) -> tw.Result:
    cluster = tw.Simulated(workers=3, step_s=0.1, faults=faults, max_restarts=0)
    return tw.fit(
        lambda: nn.Linear(4, 2), ROWS, validation=0.25, epochs=20, batch_size=5, cluster=cluster, callbacks=[log.append]
    )


def test_rows_of_a_worker_that_was_lost_are_said_to_be_left_out(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log: list[Any] = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        result = run(tw.Fault(at_s=5.0, worker=2), log=log)
    assert (result.summary["validation_rows"], result.summary["left_out"]) == (20, 10)
    evaluated = [event for event in log if isinstance(event, events.Evaluated)]
    assert [evaluated[0].left_out, evaluated[-1].left_out] == [0, 10]
    assert caplog.text.count("10 are left out") == 1, "the worker stays away for many evaluations"
    assert sum(event.left_out == 10 for event in evaluated) > 3
    summary_table(result.summary)
    assert "20 of 30 rows" in " ".join(capsys.readouterr().out.split())


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
