"""MNIST whole, where it is at hand: the recipe reaches what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.data import open_source
from thinwire.data.columns import dense
from thinwire.models.boltzmann import DBN

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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_mnist_recipe_reaches_98_5_percent(mnist: str) -> None:
    line = [sys.executable, "-m", "thinwire.cli.main", "train", str(ROOT / "recipes" / "mnist.toml"), "--json"]
    line += ["--set", f"data.source=mnist:{mnist}", "--set", f"data.validation=mnist:{mnist}?split=test"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["val_accuracy"] >= 0.985


def _net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


@pytest.mark.long
@pytest.mark.timeout(1800)
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_lenet_out_of_layer_constructors_reaches_98_5_percent_over_an_rdd(mnist: str) -> None:
    line = [sys.executable, str(ROOT / "examples" / "sparknet_by_hand.py"), mnist]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 0.985


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_network_from_a_deep_belief_network_beats_a_random_start_on_1000_labels(mnist: str) -> None:
    """Machines learn from all rows without labels; then the same network is trained on 1,000 rows, both ways."""
    cluster = tw.Local(workers=2)
    learnt = tw.fit(
        lambda: DBN((784, 256, 256)),
        f"mnist:{mnist}",
        inputs=["pixels"],
        algorithm=tw.ContrastiveDivergence(stage_steps=500),
        strategy=tw.SparkNet(period=20),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        batch_size=50,
        steps=1000,
        cluster=cluster,
        progress=False,
    ).model
    source = open_source(f"mnist:{mnist}")
    batch = next(iter(source.batches())).slice(0, 1000)
    few = (dense(batch.column("pixels")).astype("float32") / 255, dense(batch.column("label")))

    def accuracy(network: Callable[[], nn.Module]) -> float:
        trained = tw.fit(
            network,
            {"pixels": few[0], "label": few[1]},
            inputs=["pixels"],
            strategy=tw.SparkNet(period=10),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            batch_size=50,
            epochs=40,
            cluster=cluster,
            progress=False,
        ).model
        right = total = 0
        for rows in open_source(f"mnist:{mnist}?split=test").batches():
            images = torch.from_numpy(dense(rows.column("pixels")).astype("float32") / 255)
            right += int((trained(images).argmax(1) == torch.from_numpy(dense(rows.column("label")).copy())).sum())
            total += len(images)
        return right / total

    begun, random = accuracy(lambda: learnt.network(10)), accuracy(_sigmoids)
    assert begun > random + 0.03


def _sigmoids() -> nn.Module:
    """The same network with torch's own random start."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.Sigmoid(), nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 10)
    )
