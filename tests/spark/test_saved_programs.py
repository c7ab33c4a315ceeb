"""Models whose code is gone when they are loaded: pipelines of a notebook, tuned models, transforms of `__main__`."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError, ConfigError
from thinwire.models.program import Program
from thinwire.spark import TorchEstimator, TorchModel

from .test_old_saved import OLD, changed

pytestmark = pytest.mark.timeout(1200)

NOTEBOOK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))

def scaled(columns):
    columns["pixels"] = columns["pixels"] / 2.0 - 1.0
    return columns
"""
LOADED = """
import json, sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

path, rows, out = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
model = PipelineModel.load(path)
found = model.transform(spark.read.parquet(rows)).orderBy("number").collect()
json.dump([[row.prediction, *row.probability.toArray()] for row in found], open(out, "w"))
spark.stop()
"""


@pytest.fixture
def notebook() -> Any:
    """What a notebook defines: classes and functions of `__main__`, which no other process has."""
    found = types.ModuleType("__main__")
    exec(NOTEBOOK, found.__dict__)
    return found


def estimator(model: Any, **changes: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "input_cols": ["pixels"], "strategy": tw.SparkNet(period=10), "num_workers": 2, "epochs": 2, "optimizer": "sgd",
        "learning_rate": 0.1, "progress": False,
    }  # fmt: skip
    return TorchEstimator(model, **(settings | changes))


OTHERS = [pytest.param(each, marks=pytest.mark.long) for each in ("class", "module")]


@pytest.mark.parametrize("given", ["transform", *OTHERS])
def test_a_pipeline_of_a_notebook_predicts_the_same_in_a_process_without_its_code(
    digits: Any, notebook: Any, tmp_path: Path, given: str
) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer

    net = notebook.Net() if given == "module" else notebook.Net
    more = {"transform": notebook.scaled} if given == "transform" else {}
    stages = [StringIndexer(inputCol="label", outputCol="kind"), estimator(net, label_col="kind", **more)]
    fitted = Pipeline(stages=stages).fit(digits)
    rows = digits.filter("number < 100")
    rows.write.parquet(str(tmp_path / "rows"))
    fitted.save(str(tmp_path / "pipeline"))
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", LOADED, str(tmp_path / "pipeline"), str(tmp_path / "rows"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)
    })  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = fitted.transform(rows).orderBy("number").collect()
    found = np.array(json.loads(out.read_text()))
    np.testing.assert_allclose(found[:, 1:], [row.probability.toArray() for row in expected], rtol=1e-4, atol=1e-6)
    assert found[:, 0].tolist() == [row.prediction for row in expected]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cross_validated_model_loads_without_code_and_its_estimator_says_why_it_cannot_fit(
    digits: Any, notebook: Any, tmp_path: Path
) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidatorModel, ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel

    net = estimator(notebook.Net, loss=lambda output, label: nn.functional.cross_entropy(output, label), epochs=1)
    net.setTask("classification")
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    grid = ParamGridBuilder().addGrid(net.learningRate, [0.1]).build()
    split = TrainValidationSplit(estimator=net, estimatorParamMaps=grid, evaluator=evaluator, seed=1).fit(digits)
    tuned = CrossValidatorModel(split.bestModel, avgMetrics=[0.5], stdMetrics=[0.1])
    for param in (tuned.estimator, tuned.estimatorParamMaps, tuned.evaluator):
        tuned.set(param, split.getOrDefault(param.name))
    few = digits.limit(5)
    for model, kind in ((split, TrainValidationSplitModel), (tuned, CrossValidatorModel)):
        path = str(tmp_path / kind.__name__)
        model.save(path)
        loaded = kind.load(path)
        assert isinstance(loaded.bestModel.module, Program)
        expected = [row.prediction for row in model.transform(few).collect()]
        assert [row.prediction for row in loaded.transform(few).collect()] == expected
        with pytest.raises(CheckpointError, match="allow_pickle"):
            loaded.getEstimator().fit(digits)
        again = f"{path} again"
        loaded.save(again)
        assert kind.load(again).bestModel.transform(few).count() == 5
    net.save(str(tmp_path / "alone"))
    with pytest.raises(CheckpointError, match="allow_pickle"):
        TorchEstimator.load(str(tmp_path / "alone"))


def test_a_network_without_a_program_is_saved_and_load_says_why_it_has_none(
    digits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)

    fitted = estimator(Branching).fit(digits)
    path = str(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "thinwire.spark"):
        fitted.save(path)
    assert "without a program" in caplog.text
    with pytest.raises(CheckpointError, match=r"allow_pickle=True(?s:.)*saved without a program.*data-dependent"):
        TorchModel.load(path)
    again = TorchModel.load(path, model=Branching)
    assert again.transform(digits.limit(3)).collect() == fitted.transform(digits.limit(3)).collect()


def test_importable_code_is_used_before_the_program_and_a_damaged_program_is_refused(
    spark: Any, tmp_path: Path
) -> None:
    from tests.spark.saved_net import SavedNet  # as this program imports it

    frame = spark.createDataFrame([([0.1 * i, 1.0, -0.2 * i], i % 2) for i in range(40)], "f array<float>, label int")
    fitted = estimator(SavedNet, input_cols=["f"], epochs=1).fit(frame)
    path = str(tmp_path / "model")
    fitted.save(path)
    assert type(TorchModel.load(path).module) is SavedNet
    gone = {"kind": "name", "module": "not_here.nets", "name": "Net"}
    nothing = {"kind": "value", "value": None}
    moved = changed(Path(path), tmp_path / "moved", code={"skeleton": gone, "transform": nothing})
    loaded = TorchModel.load(moved)
    assert isinstance(loaded.module, Program)
    assert loaded.transform(frame).collect() == fitted.transform(frame).collect()
    assert (loaded.numFeatures, loaded.numClasses, loaded.hasParent, fitted.hasParent) == (3, 2, False, True)
    again = str(tmp_path / "again")
    loaded.save(again)
    assert isinstance(TorchModel.load(again).module, Program)
    held = json.loads(next((Path(moved) / "metadata").glob("part-*")).read_text())["thinwire"]["program"]
    wrong = changed(Path(moved), tmp_path / "wrong", program=held | {"digest": "0" * 64})
    with pytest.raises(CheckpointError, match=r"the program in .* is damaged: its digest"):
        TorchModel.load(wrong)
    old = changed(OLD[-1] / "model", tmp_path / "old", code={"skeleton": gone, "transform": nothing})
    with pytest.raises(CheckpointError, match="not imported here"):
        TorchModel.load(old)


@pytest.mark.long
def test_a_program_holds_the_transform_which_cannot_be_replaced_alone(
    digits: Any, notebook: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "model")
    fitted = estimator(notebook.Net, transform=notebook.scaled).fit(digits)
    fitted.save(path)
    few = digits.limit(4)
    with pytest.raises(ConfigError, match="is a part of the program"):
        TorchModel.load(path, transform=notebook.scaled)
    given = TorchModel.load(path, model=notebook.Net, transform=notebook.scaled)
    for model in (given, TorchModel.load(path), TorchModel.load(path, allow_pickle=True)):
        for row, expected in zip(model.transform(few).collect(), fitted.transform(few).collect(), strict=True):
            np.testing.assert_allclose(row.rawPrediction.toArray(), expected.rawPrediction.toArray(), atol=1e-5)


@pytest.mark.long
def test_images_are_decoded_before_the_program(spark: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        (("", 6, 6, 3, 16, bytearray(rng.integers(0, 255, 108, dtype=np.uint8).tobytes())), i % 2) for i in range(40)
    ]
    image = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
    frame = spark.createDataFrame(rows, f"image {image}, label int")
    layers = functools.partial(nn.Sequential, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    fitted = estimator(layers, input_cols=["image"], epochs=1).fit(frame)
    path = str(tmp_path / "model")
    fitted.save(path)
    loaded = TorchModel.load(path)
    assert isinstance(loaded.module, Program)
    for row, expected in zip(loaded.transform(frame).collect(), fitted.transform(frame).collect(), strict=True):
        np.testing.assert_allclose(row.rawPrediction.toArray(), expected.rawPrediction.toArray(), rtol=1e-4, atol=1e-5)
