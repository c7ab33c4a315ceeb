"""RDDs as data, on a cluster of executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.data import mean_image
from thinwire.spark import TorchEstimator

from .conftest import PATIENT

pytestmark = pytest.mark.timeout(900)
IMAGES = np.random.default_rng(0).normal(size=(48, 1, 2, 3)).astype(np.float32)
LABELS = [int(image.sum() > 0) for image in IMAGES]
SETTINGS: dict[str, Any] = {
    "strategy": tw.SparkNet(period=2),
    "batch_size": 4,
    "progress": False,
    "deadlines": PATIENT,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 2))


@pytest.fixture(scope="module")
def rdd(spark: Any) -> Any:
    return spark.sparkContext.parallelize(list(zip(IMAGES, LABELS, strict=True)), 4)


def test_an_rdd_trains_to_the_same_parameters_as_a_dataframe_of_the_same_rows(spark: Any, rdd: Any) -> None:
    rows = [(image.tolist(), label) for image, label in zip(IMAGES, LABELS, strict=True)]
    schema = "features array<array<array<float>>>, label bigint"
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    cluster = tw.Spark(workers=2, repartition=False)
    one = tw.fit(net, rdd.coalesce(2), epochs=2, cluster=cluster, **SETTINGS)
    assert one.summary["rows"] == 96
    assert one.summary["complete"]
    alone = tw.Spark(workers=1, repartition=False)
    two = tw.fit(net, rdd.coalesce(1), epochs=2, cluster=alone, **SETTINGS)
    three = tw.fit(net, frame, epochs=2, cluster=alone, **SETTINGS)
    for name, value in three.model.state_dict().items():
        assert torch.equal(value, two.model.state_dict()[name]), name


@pytest.mark.long
def test_an_rdd_trains_without_a_cluster_named_and_validates_on_another_rdd(spark: Any, rdd: Any) -> None:
    held = spark.sparkContext.parallelize(list(zip(IMAGES[:12], LABELS[:12], strict=True)), 2)
    result = tw.fit(net, rdd, validation=held, **SETTINGS)
    assert result.summary["workers"] == 3
    assert (result.summary["rows"], result.summary["validation_rows"]) == (48, 12)


def test_an_rdd_is_collected_for_workers_that_are_not_sparks(rdd: Any) -> None:
    result = tw.fit(net, rdd, cluster=tw.Simulated(workers=2, step_s=0.01), strategy="synchronous", progress=False)
    assert result.summary["rows"] == 48


def test_a_mean_image_is_added_up_in_the_tasks_of_a_dataframe_and_of_an_rdd(spark: Any, rdd: Any) -> None:
    wanted = torch.from_numpy(IMAGES.astype(np.float64).mean(axis=0)).float()
    rows = [(image.tolist(), label) for image, label in zip(IMAGES, LABELS, strict=True)]
    frame = spark.createDataFrame(rows, "data array<array<array<float>>>, label bigint")
    assert torch.allclose(mean_image(rdd), wanted, atol=1e-6)
    assert torch.allclose(mean_image(frame), wanted, atol=1e-6)


@pytest.mark.long
def test_an_estimator_takes_an_rdd_and_its_model_predicts_one(spark: Any, rdd: Any) -> None:
    fitted = TorchEstimator(net, num_workers=2, epochs=2, **SETTINGS).fit(rdd)
    assert fitted.getInputCols() == ["features"]
    assert fitted.summary["rows"] == 96
    found = fitted.transform(rdd).select("prediction").collect()
    fitted.module.eval()
    with torch.no_grad():
        wanted = fitted.module(torch.from_numpy(IMAGES)).argmax(1).tolist()
    assert sorted(int(row[0]) for row in found) == sorted(wanted)
    weighted = rdd.map(lambda record: {"x": record[0], "y": record[1], "w": 1.0, "held": record[1] == 0})
    named = TorchEstimator(
        net, label_col="y", weight_col="w", validation_indicator_col="held", num_workers=2, **SETTINGS
    ).fit(weighted)
    assert named.getInputCols() == ["x"]
    assert named.summary["validation_rows"] == LABELS.count(0)
