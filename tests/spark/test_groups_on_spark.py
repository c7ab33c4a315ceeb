"""One replica on several executors, and the loss of one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire import events
from thinwire.models import mlp

from .conftest import PATIENT, executor_of

pytestmark = pytest.mark.timeout(1200)


def settings(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "inputs": ["pixels"],
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "strategy": tw.Synchronous(),
        "placement": tw.Planned(group_size=3),
        "cluster": tw.Spark(workers=3),
        "epochs": 8,
        "batch_size": 16,
        "validation": 0.2,
        "progress": False,
    }
    return found | changes


def test_one_replica_spans_three_executors(digits: Any) -> None:
    result = tw.fit(mlp, digits, **settings(epochs=2, deadlines=PATIENT))
    assert result.summary["complete"]
    assert result.summary["placement"] == "planned"
    assert result.summary["rows"] == 2 * (1797 - 360)
    assert result.history


@pytest.mark.long
def test_an_executor_of_the_only_group_is_killed_and_the_run_goes_on_from_its_checkpoint(
    digits: Any, tmp_path: Path
) -> None:
    pids: dict[int, int] = {}
    killed: list[int] = []
    log: list[events.Event] = []

    def kill(event: events.Event) -> None:
        log.append(event)
        if isinstance(event, events.WorkerJoined):
            pids[event.worker] = event.pid
        if isinstance(event, events.CheckpointSaved) and event.steps >= 40 and not killed:
            killed.append(executor_of(pids[1]))
            os.kill(killed[0], signal.SIGKILL)

    changes = {"out": str(tmp_path / "run"), "checkpoint_every": 20, "callbacks": [kill], "epochs": 20}
    result = tw.fit(mlp, digits, **settings(**changes))
    assert killed
    assert result.summary["complete"]
    assert result.summary["workers_lost"] >= 1
    starts = [e.resumed_from for e in log if isinstance(e, events.RunStarted)]
    assert starts[0] is None
    assert len(starts) == 2
    assert starts[1] is not None
    assert max(row["val_accuracy"] for row in result.history) >= 0.9
