"""Messages name what is wrong, and whose mistake it is: the user's ends in exit code 2 or 3, without a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli.main import main
from thinwire.errors import ConfigError, DataError
from thinwire.run.trial import ROWS as TRIED

pytest.importorskip("google.protobuf")
RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.normal(size=(64, 4)).astype(np.float32), "label": RANDOM.integers(0, 3, 64)}
HERE = tw.Simulated(workers=2, step_s=0.01)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_a_recipe_whose_name_is_not_known_is_not_said_to_be_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digitz"]) == 2
    told = capsys.readouterr().err
    assert (
        "recipe 'digitz' is not a file and not the name of a recipe that comes with thinwire. Did you mean 'digits'?"
        in told
    )
    assert "TOML:" not in told


def test_what_a_transform_made_of_a_column_is_told_as_a_mistake_in_the_data() -> None:
    with pytest.raises(DataError, match=r"column 'x' is missing after the transform") as caught:
        tw.fit(linear, ROWS, transform=lambda columns: {"label": columns["label"]}, cluster=HERE)
    assert "Traceback" not in str(caught.value)


def test_a_batch_that_a_metric_measures_wrong_is_told_as_a_mistake_in_the_arguments() -> None:
    def mostly(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        right = (output.argmax(1) == label).float()
        return right if len(label) == TRIED else right.mean()

    with pytest.raises(ConfigError, match=r"worker . on .*metrics\.mine gives one number for a batch") as caught:
        tw.fit(linear, ROWS, validation=0.5, metrics={"mine": mostly}, cluster=HERE)
    assert "Traceback" not in str(caught.value)


def test_going_on_without_the_warm_up_that_a_run_began_with_is_a_mistake_in_the_arguments(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": tw.Synchronous(), "out": str(tmp_path), "cluster": HERE}
    schedule = {"name": "step", "step_size": 5}
    tw.fit(linear, ROWS, epochs=2, scheduler=schedule | {"warmup": 2}, checkpoint_every=2, **settings)
    with pytest.raises(ConfigError, match="the earlier run had 2 schedulers") as caught:
        tw.fit(linear, ROWS, epochs=4, scheduler=schedule, resume=str(tmp_path), **settings)
    assert "Traceback" not in str(caught.value)


def test_data_of_no_known_kind_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(DataError, match="a DataFrame of Spark or pandas, an RDD"):
        tw.fit(linear, object(), cluster=HERE)


LAYERS = {
    "HDF5Data": 'hdf5_data_param { source: "train.txt" batch_size: 8 }',
    "ImageData": 'image_data_param { source: "train.txt" batch_size: 8 }',
}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_data_layer_whose_files_are_not_read_says_what_to_convert(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.prototxt").write_text(
        f'layer {{ name: "d" type: "{kind}" top: "data" top: "label" {LAYERS[kind]} }}\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }\n'
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
    )
    (tmp_path / "recipe.toml").write_text(
        f'[model]\ncaffe = "{tmp_path}/net.prototxt"\n[cluster]\nkind = "simulated"\n'
    )
    assert main(["train", str(tmp_path / "recipe.toml")]) == 2
    told = capsys.readouterr().err
    assert f"its data layer is of type {kind}" in told
    assert "name them in data.source" in told


def test_a_caffe_net_under_a_loss_of_one_tensor_is_refused_with_how_to_take_its_output() -> None:
    net = tw.caffe.loads(
        'input: "data" input_shape { dim: 8 dim: 4 }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }\n'
    )
    with pytest.raises(ConfigError, match=r"output is a Outputs of \['ip'\].*output\['ip'\]"):
        tw.fit(net, ROWS, cluster=HERE)
