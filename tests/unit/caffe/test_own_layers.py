"""A Caffe layer of the user's own works wherever workers are."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire import caffe
from thinwire.caffe.training import training, whole_loss
from thinwire.cli.main import main

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype(np.float32)
ROWS = {"data": X, "label": (X[:, 0] > 0).astype(np.int64)}
FIELDS = """
message LayerParameter
damper_param 8471 DamperParameter
message DamperParameter
factor 1 float =0.5
"""
NET = """
layer { name: "d" type: "Input" top: "data" top: "label" input_param { shape { dim: 8 dim: 4 } shape { dim: 8 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2
        weight_filler { type: "xavier" } } }
layer { name: "own" type: "Damper" bottom: "ip" top: "own" damper_param { factor: 0.25 } }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "own" bottom: "label" top: "loss" }
"""


@caffe.layer("Damper", fields=FIELDS)
class Damper(caffe.Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.factor = spec.damper_param.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def fit(model: Any, **arguments: Any) -> tw.Result:
    return tw.fit(
        model,
        ROWS,
        inputs=["data", "label"],
        label=None,
        loss=whole_loss,
        epochs=2,
        batch_size=8,
        strategy=tw.Synchronous(),
        progress=False,
        **arguments,
    )


@pytest.mark.processes
@pytest.mark.parametrize("given", ["factory", "module"])
def test_worker_processes_know_a_layer_that_is_registered_here(given: str, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    model = functools.partial(caffe.load, str(tmp_path / "net.prototxt"))
    if given == "factory":
        model = training(str(tmp_path / "net.prototxt")).model
    torch.manual_seed(3)
    there = fit(model if given == "factory" else model(), cluster=tw.Local(workers=2))
    assert there.summary["steps"] == 8
    if given == "factory":
        here = fit(model, cluster=tw.Simulated(workers=2, step_s=0.01))
        for name, value in here.model.state_dict().items():
            torch.testing.assert_close(value, there.model.state_dict()[name], rtol=1e-4, atol=1e-5)


MODULE = """
import thinwire.caffe as caffe

@caffe.layer("FromAModule")
class FromAModule(caffe.Layer):
    def forward(self, x):
        return 0.5 * x
"""
RECIPE = """
[model]
caffe = "net.prototxt"
modules = ["layers_of_mine"]

[data]
source = "rows.parquet"
inputs = ["data"]

[cluster]
kind = "simulated"
step_s = 0.01
"""


def test_a_recipe_names_the_module_that_registers_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas as pd

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "net.prototxt").write_text(
        NET.replace('"Damper"', '"FromAModule"').replace("damper_param { factor: 0.25 }", "")
    )
    (tmp_path / "layers_of_mine.py").write_text(MODULE)
    pd.DataFrame({"data": list(X), "label": ROWS["label"]}).to_parquet("rows.parquet")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    try:
        assert main(["train", "recipe.toml", "--json"]) == 0, capsys.readouterr().err
    finally:
        sys.modules.pop("layers_of_mine", None)
    assert main(["train", "recipe.toml", "--set", 'model.modules=["no_such_layers"]']) == 2
    assert "model.modules = 'no_such_layers': No module named" in capsys.readouterr().err
