"""Caffe networks as stages of Spark ML: prototxts in, predictions and blobs out, on a cluster of executors."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire import caffe
from thinwire.errors import CheckpointError, ConfigError
from thinwire.spark import TorchEstimator, TorchModel

from .conftest import PATIENT

pytest.importorskip("google.protobuf")
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
NET = ROOT / "recipes" / "caffe" / "digits_train_val.prototxt"
SOLVER = ROOT / "recipes" / "caffe" / "digits_solver.prototxt"
DATA = """
layer { name: "data" type: "Data" top: "data" top: "label"
  transform_param { mean_file: "mean.binaryproto" scale: 0.0625 } data_param { source: "gone" batch_size: 20 } }
"""


def estimator(**changes: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "caffe": NET,
        "solver": SOLVER,
        "input_cols": ["pixels"],
        "strategy": tw.SparkNet(period=10),
        "num_workers": 3,
        "deadlines": PATIENT,
        "progress": False,
    }
    return TorchEstimator(**(settings | changes))


@pytest.fixture(scope="module")
def fitted(digits: Any) -> TorchModel:
    return estimator(validation=0.2).fit(digits)


def test_a_prototxt_and_its_solver_train_on_executors_for_as_long_as_the_solver_says(fitted: TorchModel) -> None:
    assert fitted.summary["steps"] == 200
    assert fitted.summary["rows"] > 200 * 3 * 56, "of 64 a step, save where an epoch ends"
    assert fitted.summary["val_accuracy"] >= 0.9, "the net's own Accuracy layer"
    assert [row["steps"] for row in fitted.history][:2] == [50, 100], "test_interval"


def pixels(frame: Any) -> torch.Tensor:
    return torch.tensor([row["pixels"] for row in frame.select("pixels").collect()]).view(-1, 1, 8, 8)


def test_transform_predicts_by_the_blob_that_the_loss_compares_with_labels(fitted: TorchModel, digits: Any) -> None:
    some = digits.filter("number < 100").orderBy("number")
    found = fitted.transform(some).select("rawPrediction", "prediction", "label").collect()
    net = fitted.module.eval()
    with torch.no_grad():
        net(pixels(some))
    scores = net.net.blobs["ip2"]
    assert np.allclose(np.stack([row["rawPrediction"].toArray() for row in found]), scores.numpy(), atol=1e-4)
    assert [row["prediction"] for row in found] == scores.argmax(1).double().tolist()
    assert sum(row["prediction"] == row["label"] for row in found) >= 85


@pytest.mark.long
def test_transform_gives_the_blob_that_is_chosen(fitted: TorchModel, digits: Any, tmp_path: Path) -> None:
    some = digits.filter("number < 20").orderBy("number")
    net = fitted.module.eval()
    with torch.no_grad():
        net(pixels(some))
    for name, size in (("ip1", 64), ("pool1", 16 * 4 * 4)):
        chosen = fitted.copy().setParams(output_blob=name, prediction_col="features")
        found = chosen.transform(some)
        assert "rawPrediction" not in found.columns
        values = np.array([row["features"] for row in found.select("features").collect()])
        assert values.shape == (20, size)
        assert np.allclose(values, net.net.blobs[name].flatten(1).numpy(), atol=1e-4)
    with pytest.raises(ConfigError, match=r"output_blob = 'ip3' is no blob of .*Did you mean 'ip"):
        fitted.copy().setParams(output_blob="ip3").transform(some)
    with pytest.raises(ConfigError, match=r"output_blob = 'accuracy' .*or needs labels"):
        fitted.copy().setParams(output_blob="accuracy").transform(some)


def test_a_saved_model_needs_neither_the_files_nor_a_pickle(fitted: TorchModel, digits: Any, tmp_path: Path) -> None:
    some = digits.filter("number < 20")
    fitted.save(str(tmp_path / "saved"))
    again = TorchModel.load(str(tmp_path / "saved"))
    wanted = [row["prediction"] for row in fitted.transform(some).select("prediction").collect()]
    assert [row["prediction"] for row in again.transform(some).select("prediction").collect()] == wanted
    caffe.save(again.module.net, tmp_path / "x.caffemodel")
    net = caffe.load(NET, weights=tmp_path / "x.caffemodel", phase="TEST")
    assert torch.equal(net.params["ip2"][0], fitted.module.net.params["ip2"][0])


@pytest.mark.long
def test_a_saved_estimator_trains_after_it_is_loaded(digits: Any, tmp_path: Path) -> None:
    made = estimator(epochs=1, output_blob="ip1")
    plain = {name: held for name, held in made.getOrDefault(made.fitOptions).items() if name != "deadlines"}
    made._set(fitOptions=plain).save(str(tmp_path / "made"))
    again = TorchEstimator.load(str(tmp_path / "made")).setParams(deadlines=PATIENT, progress=False)
    trained = again.fit(digits.filter("number < 400"))
    assert trained.summary["rows"] == 400
    assert len(trained.transform(digits.filter("number < 2")).first()["prediction"]) == 64


def test_executors_need_none_of_the_files_that_a_prototxt_names(digits: Any, tmp_path: Path) -> None:
    """The mean image and the caffemodel to begin from travel with the network; a data layer's rows are the frame's."""
    text = NET.read_text()
    (tmp_path / "net.prototxt").write_text(DATA + text[text.index('layer {\n  name: "conv1"') :])
    schema = caffe.schema.message("BlobProto", raw=True)
    mean = schema(channels=1, height=8, width=8, num=1, data=np.full(64, 5, "<f4").tobytes())
    (tmp_path / "mean.binaryproto").write_bytes(mean.SerializeToString())
    torch.manual_seed(3)
    caffe.save(caffe.load(NET), tmp_path / "x.caffemodel")
    whole = digits.selectExpr("transform(pixels, x -> cast(round(x * 16) as int)) as data", "label", "number")
    shaped = whole.selectExpr(
        "array(transform(sequence(0, 7), i -> slice(data, i * 8 + 1, 8))) as data", "label", "number"
    )
    made = estimator(
        caffe=tmp_path / "net.prototxt", solver=None, weights=tmp_path / "x.caffemodel", learning_rate=1e-9, steps=1
    )
    made.clear(made.inputCols)
    trained = made.fit(shaped.filter("number < 300"))
    shutil.rmtree(tmp_path)
    found = trained.transform(shaped.filter("number < 5").orderBy("number")).select("rawPrediction").collect()
    net, raw = trained.module.eval(), shaped.filter("number < 5").orderBy("number").collect()
    with torch.no_grad():
        net.net((torch.tensor([row["data"] for row in raw]).float() - 5) / 16)
    wanted = net.net.blobs["ip2"].numpy()
    assert np.allclose(np.stack([row["rawPrediction"].toArray() for row in found]), wanted, atol=1e-4)


@pytest.mark.long
def test_an_rdd_of_images_and_labels_trains_a_caffe_network(spark: Any, digits: Any) -> None:
    """SparkNet's Listing 3: `set_training_data` of an RDD, here with the strategy's own exchange."""
    rows = digits.filter("number < 600").rdd.map(
        lambda row: (np.asarray(row["pixels"], np.float32).reshape(1, 8, 8), row["label"])
    )
    made = estimator(steps=30)
    made.clear(made.inputCols)
    trained = made.fit(rows)
    assert trained.getInputCols() == ["features"]
    assert trained.summary["steps"] == 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": torch.nn.Linear(2, 2)}, "a model and a network of Caffe"),
        ({"loss": "mse"}, "loss has no meaning for a network of Caffe"),
        ({"weight_col": "number"}, "weight_col has no meaning"),
        ({"learning_rate": 0.1}, "learning_rate has no meaning"),
        ({"scheduler": "cosine"}, "solver has its own learning rates"),
        ({"caffe": "nowhere.prototxt"}, "'nowhere.prototxt' is not a file"),
        ({"input_cols": ["pixels", "label", "number"]}, "are 3 columns, and the net takes data, label"),
    ],
)
def test_what_contradicts_a_prototxt_is_refused_before_a_worker_starts(
    digits: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        estimator(**changes).fit(digits)


def test_a_blob_is_chosen_of_networks_of_caffe_only(digits: Any) -> None:
    made = TorchEstimator("mlp", input_cols=["pixels"], num_workers=2, output_blob="ip1", progress=False)
    with pytest.raises(ConfigError, match="output_blob = 'ip1' is for networks of Caffe"):
        made.fit(digits.filter("number < 64")).transform(digits)


def test_a_saved_network_that_names_a_file_has_it_from_the_saved_folder_alone(tmp_path: Path) -> None:
    from thinwire.spark.objects import Source, made_of

    secret = tmp_path / "secret"
    secret.write_bytes(b"hidden")
    text = 'input: "x" input_shape { dim: 1 dim: 2 } layer { name: "i" type: "InfogainLoss" bottom: "x" bottom: "x" '
    text += f'infogain_loss_param {{ source: "{secret}" }} }}'
    code = {"kind": "caffe", "net": text, "file": "x", "shapes": {}, "files": {}}
    with pytest.raises(Exception, match="has not travelled with the network"):
        made_of(code, "model", Source(str(tmp_path)))()
    damaged = code | {"files": {"a": base64.b64encode(b"1").decode() + "!"}, "shapes": {"x": "many"}}
    with pytest.raises(CheckpointError, match="damaged"):
        made_of(damaged, "model", Source(str(tmp_path)))
