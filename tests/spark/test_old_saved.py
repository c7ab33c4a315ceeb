"""What earlier versions saved must load for ever; a folder of tests/golden/saved is never written again."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError

OLD = sorted((Path(__file__).parents[1] / "golden" / "saved").iterdir())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's module, by the name under which the models know it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("old", OLD, ids=lambda path: path.name)
def test_a_model_of_an_earlier_version_loads_and_predicts(spark: Any, known: None, old: Path) -> None:
    from thinwire.spark import TorchModel

    expected = json.loads((old / "expected.json").read_text())
    module = TorchModel.load(str(old / "model"), modules=["saved_net"]).module
    with torch.no_grad():
        torch.testing.assert_close(module(torch.tensor(expected["features"])), torch.tensor(expected["output"]))


@pytest.mark.parametrize("old", OLD, ids=lambda path: path.name)
def test_an_estimator_of_an_earlier_version_loads(spark: Any, known: None, old: Path) -> None:
    from thinwire.spark import TorchEstimator

    estimator = TorchEstimator.load(str(old / "estimator"), modules=["saved_net"])
    assert estimator.getOrDefault("epochs") == 2
    assert estimator.getInputCols() == ["features"]
    assert estimator.getOrDefault("strategy") == tw.SparkNet(period=4)


def test_a_network_that_the_program_imported_needs_no_trust_and_another_is_not_imported(
    spark: Any, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinwire.spark import TorchModel

    monkeypatch.delitem(sys.modules, "saved_net", raising=False)
    with pytest.raises(CheckpointError, match=r"saved_net.SavedNet.*not imported here.*modules="):
        TorchModel.load(str(OLD[-1] / "model"))
    assert "saved_net" not in sys.modules
    network = importlib.import_module("saved_net").SavedNet
    assert type(TorchModel.load(str(OLD[-1] / "model")).module) is network


def changed(folder: Path, place: Path, **fields: Any) -> str:
    """A copy whose metadata say something else."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.crc"))
    (path,) = (place / "metadata").glob("part-*")
    content = json.loads(path.read_text())
    content["thinwire"] |= fields
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    return str(place)


def test_a_newer_format_is_refused_by_name(spark: Any, known: None, tmp_path: Path) -> None:
    from thinwire.spark import TorchModel

    path = changed(OLD[-1] / "model", tmp_path / "newer", format=7, version="9.1.0")
    with pytest.raises(CheckpointError, match=r"format 7.*reads formats 1 to 1\. Install thinwire 9\.1\.0 or newer"):
        TorchModel.load(path, model=nn.Identity)


def test_damaged_weights_are_found(spark: Any, known: None, tmp_path: Path) -> None:
    from thinwire.spark import TorchModel

    path = changed(OLD[-1] / "model", tmp_path / "damaged", digest="0" * 64)
    with pytest.raises(CheckpointError, match="are damaged: their digest is not"):
        TorchModel.load(path)
