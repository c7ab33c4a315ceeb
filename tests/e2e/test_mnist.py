"""MNIST whole, where it is at hand: the recipe reaches what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder named by THINWIRE_MNIST, or what a fetching script beside the checkout brings."""
    if "THINWIRE_MNIST" in os.environ:
        return os.environ["THINWIRE_MNIST"]
    script = ROOT.parent / "shared" / "data" / "get"
    if not script.exists():
        pytest.skip("MNIST is not here: name its folder in THINWIRE_MNIST")
    folder = tmp_path_factory.mktemp("sets")
    done = subprocess.run([str(script), "mnist", "--to", str(folder)], capture_output=True, timeout=100)
    if done.returncode:
        pytest.skip(f"MNIST could not be fetched: {done.stderr.decode()[-200:]}")
    return str(next(p.parent for p in folder.rglob("train-images*")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_mnist_recipe_reaches_98_5_percent(mnist: str) -> None:
    line = [sys.executable, "-m", "thinwire.cli.main", "train", str(ROOT / "recipes" / "mnist.toml"), "--json"]
    line += ["--set", f"data.source=mnist:{mnist}", "--set", f"data.validation=mnist:{mnist}?split=test"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["val_accuracy"] >= 0.985
