"""Models in MLflow's registry, used from Spark: as a UDF, and as a pipeline of Spark ML."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.spark import TorchEstimator
from thinwire.trackers import MLflow

mlflow = pytest.importorskip("mlflow", reason="no MLflow here: pip install 'thinwire[mlflow]'")

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.filterwarnings("default")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """A store of its own, where MLflow puts artifacts too."""
    uri, before, told = f"sqlite:///{tmp_path}/mlflow.db", os.getcwd(), mlflow.get_tracking_uri()
    os.chdir(tmp_path)
    mlflow.set_tracking_uri(uri)
    try:
        yield uri
    finally:
        mlflow.set_tracking_uri(told)
        os.chdir(before)


def rows(count: int = 40) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((count, 64), np.float32)


def test_a_registered_model_predicts_as_a_udf_of_spark(spark: Any, store: str) -> None:
    tracker = MLflow("digits", uri=store, example=rows(2), registered="digits")
    found = tw.fit(
        "mlp", "digits", callbacks=[tracker], steps=20, cluster=tw.Simulated(workers=2, step_s=0.1), progress=False
    )
    model = mlflow.pyfunc.load_model("models:/digits/1")
    assert [spec.shape for spec in model.metadata.signature.inputs] == [(-1, 64)]
    assert [spec.shape for spec in model.metadata.signature.outputs] == [(-1, 10)]
    assert np.array_equal(model.input_example, rows(2))
    frame = spark.createDataFrame(
        [(number, [float(value) for value in row]) for number, row in enumerate(rows())],
        "id long, features array<float>",
    )
    predict = mlflow.pyfunc.spark_udf(spark, "models:/digits/1", result_type="array<double>", env_manager="local")
    told = frame.select("id", predict("features").alias("scores")).orderBy("id").collect()
    with torch.no_grad():
        wanted = found.model(torch.from_numpy(rows())).numpy()
    np.testing.assert_allclose(np.array([row["scores"] for row in told]), wanted, rtol=1e-5, atol=1e-5)


def test_a_pipeline_goes_through_mlflow_s_spark_flavour(spark: Any, store: str) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    rng = np.random.default_rng(1)
    data = [(float(x), float(y), int(x + y > 1)) for x, y in rng.random((200, 2))]
    frame = spark.createDataFrame(data, "x double, y double, label long")
    estimator = TorchEstimator(Pair, input_cols=["features"], num_workers=2, epochs=2, batch_size=16, progress=False)
    fitted = Pipeline(stages=[VectorAssembler(inputCols=["x", "y"], outputCol="features"), estimator]).fit(frame)
    with mlflow.start_run():
        info = mlflow.spark.log_model(fitted, artifact_path="pipeline", registered_model_name="pair")
    again = mlflow.spark.load_model(info.model_uri)
    wanted = [row["prediction"] for row in fitted.transform(frame).collect()]
    assert [row["prediction"] for row in again.transform(frame).collect()] == wanted
    assert len(set(wanted)) >= 1
    assert mlflow.MlflowClient().get_registered_model("pair").latest_versions


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x.float())
        return found
