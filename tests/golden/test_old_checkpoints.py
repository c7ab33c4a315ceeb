"""Checkpoints that earlier versions wrote must load for ever.

A folder of `checkpoints/` is never written again. Who changes what a checkpoint holds adds one with `REGENERATE=1`,
under a new name of `NOW`, and leaves the others as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.checkpoint import CheckpointStore

FOLDER = Path(__file__).parent / "checkpoints"
NOW = "0.1.0-b"
"""Where `REGENERATE=1` puts those of this version, unless they are there."""
CASES: dict[str, tw.Strategy] = {
    "sparknet": tw.SparkNet(period=4),
    "relay": tw.Relay(),
    "parameter_table": tw.ParameterTable(),
}
REPEATABLE = ("sparknet",)
"""What waits at a barrier ends in the same numbers, up to what another processor rounds."""
OLD = sorted(path for path in FOLDER.glob("*/*") if path.is_dir())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def rows() -> dict[str, torch.Tensor]:
    x = torch.linspace(-1.0, 1.0, 96 * 3).reshape(96, 3).sin()
    return {"x": x, "label": (x.sum(1) > 0).long()}


def train(strategy: tw.Strategy, epochs: int, **more: Any) -> tw.Result:
    return tw.fit(
        net,
        rows(),
        inputs=["x"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9),
        strategy=strategy,
        cluster=tw.Local(workers=2, processes=False),
        epochs=epochs,
        batch_size=8,
        validation=0.25,
        progress=False,
        **more,
    )


@pytest.mark.skipif("REGENERATE" not in os.environ, reason="they are there to stay; REGENERATE=1 adds what is missing")
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_this_version_is_kept(name: str, tmp_path: Path) -> None:
    place = FOLDER / NOW / name
    if place.exists():
        pytest.skip("it is kept already")
    train(CASES[name], 2, out=str(tmp_path))
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    newest = store.latest()
    assert newest is not None
    shutil.copytree(tmp_path / "checkpoints" / newest.name, place / "checkpoints" / newest.name)
    on = train(CASES[name], 4, resume=str(tmp_path))
    state = {key: value.tolist() for key, value in on.model.state_dict().items()}
    (place / "four_epochs.json").write_text(json.dumps(state) + "\n")


def test_there_are_some_of_every_case() -> None:
    assert {path.name for path in OLD} == set(CASES)


@pytest.mark.parametrize("old", OLD, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old / "checkpoints", tmp_path / "checkpoints")
    before = CheckpointStore(str(tmp_path / "checkpoints")).latest()
    assert before is not None
    result = train(CASES[old.name], 4, resume=str(tmp_path))
    assert result.summary["complete"]
    assert result.summary["epochs"] == 4.0
    assert result.history[: len(before.meta["history"])] == before.meta["history"]
    assert result.history[-1]["epoch"] == 4.0
    if old.name in REPEATABLE:
        expected = json.loads((old / "four_epochs.json").read_text())
        for key, value in result.model.state_dict().items():
            torch.testing.assert_close(value, torch.tensor(expected[key], dtype=value.dtype), rtol=1e-3, atol=1e-5)
