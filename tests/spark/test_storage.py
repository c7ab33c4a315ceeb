"""What a saved model holds, and how it comes back; no cluster is needed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

import thinwire as tw
from thinwire.cluster.frames import decode_images
from thinwire.errors import CheckpointError, ConfigError
from thinwire.models import ZooModel
from thinwire.run.definition import in_turn
from thinwire.spark.model import skeleton_of
from thinwire.spark.objects import Source, code_of, made_of, with_decoder
from thinwire.spark.predict import Predictor


class Tied(nn.Module):
    """Reads with the weights that it writes with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def shout(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


@pytest.mark.parametrize(
    "value",
    [functools.partial(decode_images, ["image"]), in_turn(functools.partial(decode_images, ["a", "b"]), shout)],
    ids=["images", "images, then a function of a module"],
)
def test_a_transform_of_named_parts_is_stored_by_name(value: Any) -> None:
    code = json.loads(json.dumps(code_of(value)))
    assert "pickle" not in json.dumps(code)
    again = made_of(code, "transform", Source("p", [__name__]))
    assert again.func is value.func
    assert str(again.args) == str(value.args)


@pytest.mark.parametrize("of", ["system", "os.system", {"kind": "name", "module": "os", "name": "system"}])
def test_a_partial_of_anything_else_is_refused(of: Any, tmp_path: Path) -> None:
    """With arguments of its choice, a folder could have any function run."""
    code = {"kind": "partial", "of": of, "args": [{"kind": "value", "value": f"touch {tmp_path}/run"}]}
    with pytest.raises(CheckpointError, match="is not known"):
        made_of(code, "transform", Source("p"))
    assert code_of(functools.partial(shout, {1: 2}))["kind"] == "pickle"


def test_one_with_a_part_that_has_no_name_is_pickled_and_not_run_unasked() -> None:
    code = code_of(in_turn(functools.partial(decode_images, ["image"]), lambda columns: columns))
    assert code["args"][0]["kind"] == "partial", "the part that has a name keeps it"
    with pytest.raises(CheckpointError, match="allow_pickle"):
        made_of(code, "transform", Source("p"))
    assert made_of(code, "transform", Source("p", allow_pickle=True))({"x": 1}) == {"x": 1}


def test_a_transform_that_is_given_again_comes_after_the_stored_decoder() -> None:
    decoder = functools.partial(decode_images, ("image",))
    for stored in (decoder, in_turn(decoder, lambda columns: columns)):
        found = with_decoder(code_of(stored), shout, Source("p"))
        assert (found.args[0].func, found.args[0].args, found.args[1]) == (decode_images, (["image"],), shout)
    assert with_decoder(code_of(None), shout, Source("p")) is shout
    assert with_decoder(code_of(in_turn(shout, shout)), shout, Source("p")) is shout


@pytest.mark.parametrize("given", [Tied(), Tied], ids=["a network", "its factory"])
def test_tied_weights_stay_tied(given: Any) -> None:
    trained = Tied()
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    predictor = Predictor(skeleton_of(given), save(state), f"tied-{given}", ("x",), ("x",), "regression", 8)
    module = predictor.module()
    assert module.inner.weight is module.outer.weight
    assert torch.equal(module.inner.weight, trained.inner.weight)


class Signed(nn.Linear):
    """Has the same weights as a linear layer, and another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def test_models_of_equal_weights_keep_their_own_networks() -> None:
    """A folder with known weights and another network must not stand in for the model that has them."""
    from thinwire.spark import TorchModel

    weights, found = save(nn.Linear(2, 1).state_dict()), []
    for kind in (Signed, nn.Linear):
        model = TorchModel().setParams(input_cols=["x"])
        model._skeleton, model._weights = functools.partial(kind, 2, 1), weights
        found.append((type(model.module), type(model.copy().module)))
    assert found == [(Signed, Signed), (nn.Linear, nn.Linear)]


def test_a_task_takes_the_gpu_that_spark_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import TaskContext
    from pyspark.resource import ResourceInformation

    from thinwire.cluster.sessions import gpu_given

    context = object.__new__(TaskContext)
    monkeypatch.setattr(TaskContext, "_taskContext", context)
    for given, expected in (({}, None), ({"gpu": ResourceInformation("gpu", ["3", "5"])}, 3)):
        monkeypatch.setattr(context, "_resources", given, raising=False)
        assert gpu_given() == expected


def test_columns_of_structs_come_as_frames_where_spark_has_pandas_udfs_only() -> None:
    """PySpark 3.5: an ML vector is a struct, and pandas gets it as a DataFrame of its fields."""
    import pandas as pd

    from thinwire.spark.predict import _as_arrow

    frame = pd.DataFrame({"type": [1, 1], "size": [None, None], "values": [[1.0, 2.0], [3.0, 4.0]]})
    found = _as_arrow(frame)
    assert found.field("values").to_pylist() == [[1.0, 2.0], [3.0, 4.0]]
    assert _as_arrow(pd.Series([1.5, 2.5])).to_pylist() == [1.5, 2.5]


ENCODER = tw.TableEncoder(
    categorical=["carrier"],
    numeric=["distance"],
    vocabularies={"carrier": ("UA", "B6")},
    scales={"distance": (800.0, 300.0)},
)


@pytest.mark.parametrize("value", [ENCODER, in_turn(functools.partial(decode_images, ["image"]), ENCODER)])
def test_a_table_s_encoder_is_stored_as_plain_data(value: Any) -> None:
    code = json.loads(json.dumps(code_of(value)))
    assert '"pickle"' not in json.dumps(code)
    again = made_of(code, "transform", Source("p"))
    assert (again if again == ENCODER else again.args[1]) == ENCODER


def test_a_network_with_settings_is_stored_as_plain_data() -> None:
    model = ZooModel("deepfm", {**ENCODER.shape, "width": 4})
    again = made_of(json.loads(json.dumps(code_of(model))), "model", Source("p"))
    assert again == model
    shapes = [{name: value.shape for name, value in each().state_dict().items()} for each in (model, again)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("slot", "code"),
    [
        ("transform", {"kind": "table", "state": {"categorical": ["a"], "call": "os.system"}}),
        ("transform", {"kind": "table", "state": "os.system"}),
        ("transform", {"kind": "table", "state": {"categorical": ["a"], "vocabularies": {"a": [["x"]]}, "scales": {}}}),
        ("transform", {"kind": "table", "state": {}, "more": 1}),
        ("transform", {"kind": "settings", "name": "deepfm", "settings": {}}),
        ("model", {"kind": "table", "state": ENCODER.state()}),
        ("model", {"kind": "settings", "name": "os:system", "settings": {}}),
        ("model", {"kind": "settings", "name": "torch.nn:Linear", "settings": {"in_features": 1, "out_features": 1}}),
        ("model", {"kind": "settings", "name": "deepfm", "settings": {"factory": "os.system"}}),
        ("model", {"kind": "settings", "name": "deepfm", "settings": [1]}),
        ("model", {"kind": "settings", "name": ["deepfm"], "settings": {}}),
        ("loss", {"kind": "table", "state": ENCODER.state()}),
    ],
    ids=str,
)
def test_a_table_or_settings_that_nobody_stored_are_refused(slot: str, code: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        made_of(code, slot, Source("p"))


def test_settings_that_no_network_has_are_refused_when_it_is_made() -> None:
    settings = {"sizes": {"a": 10**15}, "numbers": {}}
    with pytest.raises(ConfigError, match="is too large"):
        made_of({"kind": "settings", "name": "deepfm", "settings": settings}, "model", Source("p"))()
