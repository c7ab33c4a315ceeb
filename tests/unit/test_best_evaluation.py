"""The summary says which evaluation was the best, and which model is given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import thinwire as tw
from thinwire.cli.tables import summary_table
from thinwire.dashboard.event_reducer import EventReducer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(160, 8)).astype(np.float32)
LABEL = RANDOM.integers(0, 2, 160)
HELD = {"x": X[32:], "label": LABEL[32:]}


def overfitted(**arguments: Any) -> tw.Result:
    """Labels are noise, so that the validation loss rises soon."""
    return tw.fit(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)),
        {"x": X[:32], "label": LABEL[:32]},
        validation=HELD,
        epochs=30,
        batch_size=8,
        optimizer={"name": "sgd", "lr": 0.5},
        **{"cluster": tw.Simulated(workers=2, step_s=0.01), **arguments},
    )


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(torch.from_numpy(HELD["x"])), torch.from_numpy(HELD["label"])))


@pytest.mark.parametrize("restore", [True, False])
def test_the_summary_says_which_model_is_given_back(
    restore: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    result = overfitted(restore_best=restore, out=tmp_path, callbacks=[told.append])
    losses = {row["number"]: row["val_loss"] for row in result.history}
    best = min(losses, key=losses.__getitem__)
    summary = result.summary
    assert summary["val_loss"] == losses[max(losses)]
    assert (summary["best_evaluation"], summary["best_val_loss"]) == (best, losses[best])
    assert losses[best] < losses[max(losses)]
    assert summary["model"] == ("best" if restore else "last")
    assert loss_of(result.model) == pytest.approx(summary["best_val_loss" if restore else "val_loss"], rel=1e-5)
    summary_table(summary)
    shown = capsys.readouterr().out
    assert f"{losses[best]:.4f} (evaluation {best})" in shown
    assert ("that of the best evaluation" if restore else "the last") in shown


def test_the_page_names_the_best_evaluation_and_the_model_given_back(tmp_path: Path) -> None:
    summary = overfitted(restore_best=True, out=tmp_path).summary
    story = EventReducer()
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        story.feed(json.loads(line))
    assert story.head["best"]["number"] == summary["best_evaluation"]
    assert story.head["best"]["metrics"]["val_loss"] == summary["best_val_loss"]
    assert story.head["summary"]["model"] == "best"


def test_a_run_without_evaluations_has_no_best_one() -> None:
    result = tw.fit(lambda: nn.Linear(8, 2), HELD, cluster=tw.Simulated(workers=1, step_s=0.01))
    assert (result.summary["best_evaluation"], result.summary["best_val_loss"]) == (None, None)
    assert result.summary["model"] == "last"


def test_a_run_that_goes_on_remembers_its_best_evaluation(tmp_path: Path) -> None:
    first = overfitted(strategy=tw.Synchronous(), out=tmp_path, checkpoint_every=4)
    again = overfitted(strategy=tw.Synchronous(), resume=tmp_path, steps=first.summary["steps"] + 4)
    assert again.summary["best_evaluation"] == first.summary["best_evaluation"]
    assert again.summary["best_val_loss"] == first.summary["best_val_loss"]


def test_a_worker_that_is_replaced_after_an_evaluation_is_handed_the_best_model_with_the_joint_state() -> None:
    cluster = tw.Simulated(workers=2, step_s=0.1, faults=[tw.Fault(at_s=3.0, worker=0, seconds=0.2)])
    told: list[Any] = []
    result = overfitted(restore_best=True, cluster=cluster, callbacks=[told.append])
    assert "rejoined" in [event.kind for event in told]
    assert result.summary["model"] == "best"
    assert loss_of(result.model) == pytest.approx(result.summary["best_val_loss"], rel=1e-5)
