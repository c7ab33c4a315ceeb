"""Folders of saved models and estimators that were made to run code, through the public way to load them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError, ConfigError

from .test_old_saved import OLD, changed

RUN = {"kind": "name", "module": "torch.utils.collect_env", "name": "run"}
NOTHING = {"kind": "value", "value": None}


class Small(nn.Module):
    """A class of a module that this program has imported, in the form of the stored weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


SMALL = {"kind": "name", "module": __name__, "name": "Small"}


def make_small() -> nn.Module:
    """A factory, which no folder may name unless its module is trusted."""
    return Small()


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    """A transform, likewise."""
    return {name: value * 2 for name, value in columns.items()}


def named(function: Any) -> dict[str, Any]:
    return {"kind": "name", "module": __name__, "name": function.__name__}


def shell(marker: Path) -> dict[str, Any]:
    """A "network" that would be made by F(F(text)), F being a function that hands text to a shell."""
    return {"kind": "partial", "of": "in_turn", "args": [RUN, RUN, {"kind": "value", "value": f"touch {marker}"}]}


def test_a_network_that_is_a_call_runs_nothing_at_load_and_in_no_use(spark: Any, tmp_path: Path) -> None:
    from thinwire.spark import TorchModel

    marker = tmp_path / "ran"
    path = changed(OLD[-1] / "model", tmp_path / "m", code={"skeleton": shell(marker), "transform": NOTHING})
    frame = spark.createDataFrame([([0.0, 1.0, 2.0],)], "features array<double>")
    for use in (lambda model: model.module, lambda model: model.transform(frame).collect()):
        with contextlib.suppress(Exception):
            use(TorchModel.load(path))
        assert not marker.exists()
    with pytest.raises(CheckpointError, match="is not known"):
        TorchModel.load(path)


@pytest.mark.parametrize("slot", ["model", "loss", "optimizer"])
def test_an_estimator_s_objects_are_no_calls_either(spark: Any, tmp_path: Path, slot: str) -> None:
    from thinwire.spark import TorchEstimator

    marker = tmp_path / "ran"
    codes = {"model": {"kind": "zoo", "name": "mlp"}, slot: shell(marker)}
    path = changed(OLD[-1] / "estimator", tmp_path / "e", code=codes)
    frame = spark.createDataFrame([([0.0, 1.0, 2.0], 1)] * 4, "features array<float>, label int")
    with contextlib.suppress(Exception):
        loaded = TorchEstimator.load(path)
        loaded.setParams(cluster=tw.Spark(workers=1)).fit(frame)
    assert not marker.exists()
    with pytest.raises(CheckpointError, match="is not known"):
        TorchEstimator.load(path)


@pytest.mark.parametrize("given", [{}, {"model": Small}], ids=["alone", "model="])
@pytest.mark.parametrize("package", [False, True], ids=["namespace", "package"])
def test_a_module_in_the_loaded_folder_is_not_imported(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], package: bool
) -> None:
    """The folder that holds the model's is on the path, as the current folder is in a notebook."""
    from thinwire.spark import TorchModel

    marker, name = tmp_path / "ran", f"hostile_{package}_{len(given)}"
    code = {"skeleton": SMALL, "transform": {"kind": "name", "module": f"{name}.evil", "name": "prepare"}}
    path = Path(changed(OLD[-1] / "model", tmp_path / name, code=code))
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef prepare(columns):\n    return columns\n")
    if package:
        (path / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match="not imported here"):
        TorchModel.load(str(path), **given)
    for folder in (str(path), path.as_uri()):
        with pytest.raises(CheckpointError, match="a part of the folder that is loaded"):
            TorchModel.load(folder, **given, modules=[name])
    assert not marker.exists()
    assert f"{name}.evil" not in sys.modules
    assert name not in sys.modules


@pytest.mark.parametrize("section", ["paramMap", "defaultParamMap"])
@pytest.mark.parametrize(
    "value",
    [{"model": "hostile:make"}, {"optimizer": "hostile:make"}, {"fitOptions": {"transform": "hostile:make"}}],
    ids=lambda value: next(iter(value)),
)
def test_plain_parameters_are_no_way_round(spark: Any, tmp_path: Path, section: str, value: Any) -> None:
    from thinwire.spark import TorchEstimator

    path = tmp_path / "e"
    shutil.copytree(OLD[-1] / "estimator", path, ignore=shutil.ignore_patterns("*.crc"))
    (file,) = (path / "metadata").glob("part-*")
    content = json.loads(file.read_text())
    content[section] |= value
    file.write_text(json.dumps(content) + "\n")
    with pytest.raises(CheckpointError):
        TorchEstimator.load(str(path))


def test_a_network_named_in_words_is_not_imported(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.spark import TorchEstimator

    (tmp_path / "hostile_words.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    codes = {"model": {"kind": "value", "value": "hostile_words:make"}}
    path = changed(OLD[-1] / "estimator", tmp_path / "e", code=codes)
    with pytest.raises(CheckpointError, match="not imported here"):
        TorchEstimator.load(path)
    assert not (tmp_path / "ran").exists()


def test_an_imported_class_loads_and_functions_need_trust_or_are_given(spark: Any, tmp_path: Path) -> None:
    from thinwire.spark import TorchModel

    own = changed(OLD[-1] / "model", tmp_path / "own", code={"skeleton": SMALL, "transform": NOTHING})
    expected = TorchModel.load(own).module.state_dict()
    code = {"skeleton": named(make_small), "transform": named(doubled)}
    path = changed(OLD[-1] / "model", tmp_path / "m", code=code)
    with pytest.raises(CheckpointError, match=r"as its model.*modules=\['package'\]"):
        TorchModel.load(path)
    with pytest.raises(CheckpointError, match=r"as its transform.*give it yourself"):
        TorchModel.load(path, model=make_small)
    with pytest.raises(ConfigError, match="may name only listed parts"):
        TorchModel.load(path, modules=["torch"])
    frame = spark.createDataFrame([([0.0, 1.0, 2.0],)], "features array<float>")
    loaded = (TorchModel.load(path, modules=[__name__]), TorchModel.load(path, model=Small, transform=doubled))
    rows = [model.transform(frame).collect() for model in loaded]
    assert rows[0] == rows[1]
    for model in loaded:
        assert all(torch.equal(value, model.module.state_dict()[name]) for name, value in expected.items())


def test_an_estimator_takes_given_objects_in_place_of_stored_ones(spark: Any, tmp_path: Path) -> None:
    from thinwire.spark import TorchEstimator

    codes = {"model": named(make_small), "loss": RUN, "fitOptions.transform": named(doubled)}
    path = changed(OLD[-1] / "estimator", tmp_path / "e", code=codes)
    with pytest.raises(CheckpointError):
        TorchEstimator.load(path)
    loaded = TorchEstimator.load(path, model=Small, loss="mse", transform=doubled)
    assert loaded.getOrDefault("model") is Small
    assert loaded.getOrDefault("loss") == "mse"
    assert loaded.getOrDefault("fitOptions") == {"transform": doubled}
