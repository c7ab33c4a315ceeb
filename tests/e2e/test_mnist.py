"""MNIST whole, where it is at hand: the recipe reaches what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw

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


def _net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eventual_consistency_comes_as_far_as_synchronous_training(mnist: str) -> None:
    """Within half a point, each with the learning rate that suits it: a momentum of many updates is its own."""

    def fit(strategy: tw.Strategy, rate: float, momentum: float) -> float:
        result = tw.fit(
            _net,
            f"mnist:{mnist}",
            inputs=["pixels"],
            validation=f"mnist:{mnist}?split=test",
            strategy=strategy,
            cluster=tw.Local(workers=2),
            epochs=4,
            batch_size=64,
            optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum),
            progress=False,
        )
        return float(result.history[-1]["val_accuracy"])

    together, eventual = fit(tw.Synchronous(), 0.05, 0.9), fit(tw.ParameterTable(), 0.2, 0.0)
    assert eventual >= together - 0.005
