"""Every recipe runs, made small."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"


def trained(recipe: str, *changes: str, timeout_s: float = 100, backend: str = "torch") -> dict[str, float]:
    line = [sys.executable, "-m", "thinwire.cli.main", "train", f"recipes/{recipe}.toml", "--json"]
    for change in changes:
        line += ["--set", change]
    own = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=own)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_code_of_the_how_to_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "algorithms.md").read_text()
    code = "\n".join(part.split("```")[0] for part in text.split("```python\n")[1:])
    (tmp_path / "code.py").write_text(code)
    done = subprocess.run([sys.executable, "code.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tensor([9.]" in done.stdout


def test_no_recipe_is_left_out() -> None:
    tested = {"digits", "mnist", "caffe", "rbm", "dbn", "dbm", "autoencoder", "shakespeare", "cifar10", "keras"}
    assert {path.stem for path in (ROOT / "recipes").glob("*.toml")} == tested


@pytest.mark.parametrize(("recipe", "error"), [("rbm", 0.045), ("dbn", 0.05), ("dbm", 0.05), ("autoencoder", 0.05)])
def test_what_learns_without_labels_makes_rows_again(recipe: str, error: float) -> None:
    """The mean of all rows in place of each would have an error of 0.075."""
    assert trained(recipe)["val_loss"] < error


def test_keras() -> None:
    for name in ("keras", "jax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    assert trained("keras", backend="jax")["val_accuracy"] > 0.9


def test_cifar10_small(tmp_path: Path) -> None:
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


def test_shakespeare_small(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    found = trained(
        "shakespeare",
        f"data.source=text:{text}",
        f"data.validation=text:{text}?split=test",
        "train.epochs=8",
        "train.until=val_loss <= 2.0",
    )
    assert found["val_loss"] < 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_shakespeare_below_1_9_nats_a_character() -> None:
    text = os.environ.get("THINWIRE_SHAKESPEARE", str(SHAKESPEARE))
    if not os.path.isfile(text):
        pytest.skip("tiny Shakespeare is not here: name its file in THINWIRE_SHAKESPEARE")
    found = trained(
        "shakespeare",
        f"data.source=text:{text}",
        f"data.validation=text:{text}?split=test",
        "train.until=val_loss <= 1.89",
        timeout_s=580,
    )
    assert found["val_loss"] < 1.9
