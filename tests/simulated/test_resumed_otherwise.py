"""A run that goes on with what its checkpoint cannot be of is refused by the driver, before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import CheckpointError

RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.standard_normal((60, 4)).astype("f4"), "label": RANDOM.integers(0, 3, 60)}


def fit(model: Any = lambda: nn.Linear(4, 3), **arguments: Any) -> tw.Result:
    given: dict[str, Any] = {"strategy": tw.Synchronous(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    return tw.fit(model, ROWS, cluster=tw.Simulated(workers=2, step_s=0.01), progress=False, **given | arguments)


def frozen_bias() -> nn.Module:
    made = nn.Linear(4, 3)
    made.bias.requires_grad_(False)
    return made


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, "optimizer SGD of 1 groups, not Adam of 1 groups"),
        ({"optimizer": lambda p: torch.optim.SGD([{"params": [x]} for x in p], lr=0.1)}, "not SGD of 2 groups"),
        ({"model": lambda: nn.Linear(4, 4)}, "is of a network whose trained parameters or buffers have other names"),
        ({"model": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "is of a network whose"),
        ({"model": frozen_bias}, "the same frozen parameters"),
    ],
    ids=["another optimizer", "other groups", "another network", "more layers", "fewer trained parameters"],
)
def test_a_checkpoint_of_something_else_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    fit(epochs=1, out=tmp_path)
    log: list[events.Event] = []
    with pytest.raises(CheckpointError, match=told):
        fit(**({"epochs": 2, "resume": tmp_path, "callbacks": [log.append]} | change))
    assert not log, "refused before anything runs"


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"batch_size": 7},
    ],
    ids=["another rate", "another loss", "another batch"],
)
def test_what_may_change_when_a_run_goes_on_may(change: dict[str, Any], tmp_path: Path) -> None:
    fit(epochs=1, out=tmp_path)
    assert fit(epochs=2, resume=tmp_path, **change).summary["epochs"] == 2.0
