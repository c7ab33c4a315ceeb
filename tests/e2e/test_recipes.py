"""Every recipe runs, made small."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.programs import page_here

ROOT = Path(__file__).parents[2]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"


pytestmark = pytest.mark.timeout(1800)
VIRTUAL = ("cluster.kind=simulated", "cluster.step_s=0.01")
"""What is learnt is asserted in virtual time."""


@pytest.fixture
def trained(command: Any) -> Callable[..., dict[str, float]]:
    """The summary of a recipe with some changes."""

    def train(recipe: str, *changes: str) -> dict[str, float]:
        line = [word for change in changes for word in ("--set", change)]
        done = command("train", f"recipes/{recipe}.toml", "--json", *line)
        assert done.returncode == 0, done.stderr
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    return train


def test_the_code_of_the_how_to_runs(tmp_path: Path) -> None:
    assert "tensor([9.]" in page_here(ROOT / "docs" / "how-to" / "algorithms.md", tmp_path)


def test_no_recipe_is_left_out() -> None:
    tested = {"digits", "mnist", "caffe", "rbm", "dbn", "dbm", "autoencoder", "shakespeare", "cifar10", "keras"} | {
        "flights"
    }
    assert {path.stem for path in (ROOT / "recipes").glob("*.toml")} == tested


@pytest.mark.parametrize(("recipe", "error"), [("rbm", 0.045), ("dbn", 0.05), ("dbm", 0.05), ("autoencoder", 0.05)])
def test_what_learns_without_labels_makes_rows_again(trained: Any, recipe: str, error: float) -> None:
    """The mean of all rows in place of each would have an error of 0.075."""
    assert trained(recipe, *VIRTUAL)["val_loss"] < error


def test_flights_come_to_an_auc_from_a_join(trained: Any, tmp_path: Path) -> None:
    """As examples/flights.py joins them in SQL; of January, to be quick."""
    folder = Path(os.environ.get("THINWIRE_FLIGHTS", ROOT.parent / "shared" / "data" / "tabular" / "nycflights13"))
    if not (folder / "flights.parquet").exists():
        pytest.skip("the tables of nycflights13 are not here: name their folder in THINWIRE_FLIGHTS")
    tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in ("flights", "weather", "planes")}
    flights = tables["flights"].query("month == 1 and arr_delay.notna()")
    weather = tables["weather"].drop(columns=["year", "time_hour"])
    planes = tables["planes"][["tailnum", "year", "manufacturer", "engine", "seats"]].rename(columns={"year": "built"})
    joined = flights.merge(weather, on=["month", "day", "hour", "origin"]).merge(planes, on="tailnum", how="left")
    joined["late"] = (joined["arr_delay"] > 15).astype("int64")
    joined["age"] = 2013 - joined["built"]
    joined["weekday"] = pd.to_datetime(joined["time_hour"]).dt.dayofweek
    joined.to_parquet(tmp_path / "joined.parquet")
    source = f"data.source={tmp_path / 'joined.parquet'}"
    summary = trained("flights", source, "train.epochs=3", "train.batch_size=128", "strategy.name=sparknet", *VIRTUAL)
    assert 0.69 < summary["val_auc"] < 0.85
    assert 0.3 < summary["val_average_precision"] < 0.8, "a fifth of the flights are late"


@pytest.mark.long
def test_keras() -> None:
    """In a process of its own, as a backend is chosen once."""
    for name in ("keras", "jax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    line = [sys.executable, "-m", "thinwire", "train", "recipes/keras.toml", "--json"]
    own = os.environ | {"KERAS_BACKEND": "jax"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=1700, cwd=ROOT, env=own)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["val_accuracy"] > 0.9


def test_cifar10_small(trained: Any, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for name, count in (("data_batch_1", 256), ("test_batch", 64)):
        rows = chance.integers(0, 256, (count, 3073)).astype(np.uint8)
        rows[:, 0] %= 10
        rows.tofile(tmp_path / f"{name}.bin")
    found = trained(
        "cifar10",
        f"data.source=cifar10:{tmp_path}",
        f"data.validation=cifar10:{tmp_path}?split=test",
        "train.epochs=1",
        "train.batch_size=32",
    )
    assert found["rows"] == 256


def test_shakespeare_small(trained: Any, tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)
    found = trained(
        "shakespeare",
        f"data.source=text:{text}",
        f"data.validation=text:{text}?split=test",
        "train.epochs=2",
        *VIRTUAL,
    )
    assert found["val_loss"] < math.log(128), "better than chance"


@pytest.mark.long
def test_shakespeare_below_1_9_nats_a_character(trained: Any) -> None:
    text = os.environ.get("THINWIRE_SHAKESPEARE", str(SHAKESPEARE))
    if not os.path.isfile(text):
        pytest.skip("tiny Shakespeare is not here: name its file in THINWIRE_SHAKESPEARE")
    found = trained(
        "shakespeare",
        f"data.source=text:{text}",
        f"data.validation=text:{text}?split=test",
        "train.until=val_loss <= 1.89",
    )
    assert found["val_loss"] < 1.9
