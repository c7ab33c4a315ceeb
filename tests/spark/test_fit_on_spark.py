"""`tw.fit` and `TorchEstimator` on a real cluster of executors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError, DataError, WorkerError
from thinwire.models import mlp
from thinwire.spark import TorchEstimator, TorchModel
from thinwire.strategies import name_of

from .conftest import PATIENT

pytestmark = pytest.mark.timeout(1200)


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def estimator(**changes: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "model": mlp,
        "input_cols": ["pixels"],
        "label_col": "label",
        "strategy": tw.SparkNet(period=10),
        "num_workers": 3,
        "epochs": 10,
        "batch_size": 16,
        "optimizer": momentum_sgd,
        "progress": False,
    }
    return TorchEstimator(**(settings | changes))


@pytest.fixture(scope="module")
def fitted(digits: Any) -> TorchModel:
    return estimator(validation=0.2).fit(digits)


def test_the_same_recipe_and_seed_give_the_same_parameters_on_spark_as_on_local(spark: Any) -> None:
    settings: dict[str, Any] = {
        "inputs": ["pixels"],
        "strategy": tw.SparkNet(period=5),
        "optimizer": momentum_sgd,
        "epochs": 3,
        "validation": 0.2,
        "seed": 7,
        "deadlines": PATIENT,
        "progress": False,
    }
    here = tw.fit(mlp, "digits", cluster=tw.Local(workers=3, threads=1), **settings)
    there = tw.fit(mlp, "digits", cluster=tw.Spark(workers=3, threads=1), **settings)
    assert there.summary["rows"] == here.summary["rows"]
    assert there.summary["val_loss"] == pytest.approx(here.summary["val_loss"], rel=1e-6)
    for name, value in here.model.state_dict().items():
        assert torch.equal(value, there.model.state_dict()[name]), name


def test_an_error_on_an_executor_reaches_the_driver_with_host_and_worker(digits: Any) -> None:
    def broken() -> nn.Module:
        raise ArithmeticError("no such luck")

    with pytest.raises(WorkerError, match=r"worker \d on \S+ (?s:.)*no such luck"):
        tw.fit(broken, digits, inputs=["pixels"], cluster=tw.Spark(workers=2, preflight=False), progress=False)


@pytest.mark.parametrize(
    "strategy",
    [
        tw.EASGD(period=4, servers="driver"),
        pytest.param(tw.DeepSpark(period=4), marks=pytest.mark.long),
        pytest.param(tw.ParameterTable(consistency="strict"), marks=pytest.mark.long),
    ],
    ids=name_of,
)
def test_asynchronous_strategies_train_on_executors(digits: Any, strategy: tw.Strategy) -> None:
    fitted = estimator(strategy=strategy, epochs=3, validation=0.2).fit(digits)
    assert fitted.summary["complete"]
    assert fitted.summary["refused"] == 0
    assert fitted.summary["rows"] == 3 * (1797 - 360)
    assert fitted.summary["val_accuracy"] > 0.2, "twice as good as chance"


def test_nulls_are_refused_with_column_and_count(spark: Any) -> None:
    frame = spark.createDataFrame([([1.0, 2.0], 0), ([1.0, None], 1), (None, 1)] * 4, "x array<float>, label int")
    with pytest.raises(DataError, match=r"column 'x' has \d+ null"):
        tw.fit(lambda: nn.Linear(2, 2), frame, inputs=["x"], cluster=tw.Spark(workers=2), progress=False)


def test_a_column_that_is_not_there_is_named_before_any_job_starts(digits: Any) -> None:
    with pytest.raises(DataError, match="pixls"):
        tw.fit(mlp, digits, inputs=["pixls"], cluster=tw.Spark(workers=2), progress=False)


def test_skewed_and_empty_partitions_are_trained_on_whole(digits: Any, caplog: pytest.LogCaptureFixture) -> None:
    """horovod/horovod#118, dmlc/xgboost#8221: as the frame is, one partition has all rows and two have none."""
    frame = digits.filter("number < 200").repartition(3, digits.label < 99)
    settings: dict[str, Any] = {"inputs": ["pixels"], "strategy": tw.SparkNet(period=3), "deadlines": PATIENT}
    cluster = tw.Spark(workers=3, repartition=False)
    result = tw.fit(mlp, frame, cluster=cluster, epochs=3, progress=False, **settings)
    assert result.summary["rows"] == 600
    told = [record.getMessage() for record in caplog.records if "no rows" in record.getMessage()]
    assert len(told) == 2
    assert result.summary["workers"] == 3
    assert result.summary["complete"]


def test_with_validation_rows_in_a_frame_of_their_own_every_worker_has_rows_of_both(digits: Any) -> None:
    """Merged as they lie, partitions of either frame would come to workers that have rows of one kind only."""
    train, held = digits.filter("number < 1200"), digits.filter("number >= 1200")
    log: list[events.Event] = []
    tw.fit(
        mlp, train, inputs=["pixels"], validation=held, strategy=tw.SparkNet(period=3), cluster=tw.Spark(workers=3),
        epochs=1, callbacks=[log.append], deadlines=PATIENT, progress=False,
    )  # fmt: skip
    joined = {e.worker: e.rows for e in log if isinstance(e, events.WorkerJoined)}
    assert sum(joined.values()) == 1200
    assert min(joined.values()) > 300
    cluster = tw.Spark(workers=3, repartition=False)
    with pytest.raises(ConfigError, match="here are two"):
        tw.fit(mlp, train, inputs=["pixels"], validation=held, cluster=cluster, epochs=1, progress=False)


def test_fewer_partitions_than_workers_are_refused(digits: Any) -> None:
    """A worker is a partition: the others would never come."""
    with pytest.raises(ConfigError, match="has 1 partitions and 3 workers"):
        tw.fit(mlp, digits.coalesce(1), inputs=["pixels"], cluster=tw.Spark(workers=3, repartition=False))


def test_a_model_adds_its_columns_and_keeps_the_others(digits: Any, fitted: TorchModel) -> None:
    """TensorFlowOnSpark drops them."""
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    found = fitted.transform(digits)
    assert found.columns == [*digits.columns, "rawPrediction", "probability", "prediction"]
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    assert evaluator.evaluate(found) >= 0.9
    rows = found.filter("number < 5").orderBy("number").collect()
    module = fitted.module
    with torch.no_grad():
        raw = module(torch.tensor([row.pixels for row in rows]))
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in rows], raw.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row.probability.toArray().sum() for row in rows], 1.0, rtol=1e-5)
    assert [int(row.prediction) for row in rows] == raw.argmax(1).tolist()


def test_a_model_is_saved_and_loaded(fitted: TorchModel, digits: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    fitted.save(path)
    again = TorchModel.load(path)
    assert again.uid == fitted.uid
    assert again.summary == fitted.summary
    for name, value in fitted.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name])
    few = digits.filter("number < 3").orderBy("number")
    assert again.transform(few).collect() == fitted.transform(few).collect()


def test_the_history_is_a_data_frame(fitted: TorchModel, spark: Any) -> None:
    frame = fitted.history_frame(spark)
    assert frame.count() == len(fitted.history) >= 5
    assert {"epoch", "val_accuracy", "val_loss"} <= set(frame.columns)


def test_pipeline_vectors_weights_and_a_validation_column(spark: Any, digits: Any) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StandardScaler
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F  # noqa: N812

    frame = digits.select(
        array_to_vector("pixels").alias("raw"),
        "label",
        F.lit(1.0).alias("weight"),
        (F.col("number") % 5 == 0).alias("held"),
    )
    scaler = StandardScaler(inputCol="raw", outputCol="scaled", withMean=True)
    net = estimator(input_cols=["scaled"], weight_col="weight", validation_indicator_col="held", epochs=4)
    made = Pipeline(stages=[scaler, net]).fit(frame)
    trained = made.stages[-1]
    assert trained.summary["rows"] == 4 * (1797 - 360)
    assert trained.history[-1]["val_accuracy"] > 0.8
    assert made.transform(frame.limit(5)).filter("prediction is not null").count() == 5


def test_labels_of_a_string_indexer_are_classes_and_predictions_go_back_to_names(spark: Any) -> None:
    """What Spark ML's own stages make: labels are doubles, inputs are vectors."""
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler

    kinds = ("oak", "elm", "ash")
    rows = [(kinds[i % 3], float(i % 3 == 0), float(i % 3 == 1), i / 90) for i in range(90)]
    frame = spark.createDataFrame(rows, "kind string, a double, b double, c double")
    indexed = StringIndexer(inputCol="kind", outputCol="label", stringOrderType="alphabetAsc")
    stages = [
        indexed,
        VectorAssembler(inputCols=["a", "b", "c"], outputCol="features"),
        estimator(
            model=lambda: nn.Linear(3, 3), input_cols=["features"], num_workers=2, epochs=1, batch_size=2,
            strategy=tw.SparkNet(period=5), optimizer="sgd", learning_rate=1.0, validation=0.2,
        ),
        IndexToString(inputCol="prediction", outputCol="named", labels=sorted(kinds)),
    ]  # fmt: skip
    made = Pipeline(stages=stages).fit(frame)
    assert made.stages[2].history[-1]["val_accuracy"] > 0.9
    found = made.transform(frame)
    assert {f.name: f.dataType.typeName() for f in found.schema.fields}["prediction"] == "double"
    for metric in ("accuracy", "logLoss"):
        assert 0.0 < MulticlassClassificationEvaluator(metricName=metric).evaluate(found) <= 1.0
    assert found.filter("named = kind").count() > 80


def test_a_label_that_is_no_class_is_refused_where_rows_are_dealt(spark: Any) -> None:
    rows = [([float(i), 1.0], 7.0 if i == 11 else float(i % 3)) for i in range(40)]
    frame = spark.createDataFrame(rows, "x array<double>, label double")
    told = r"column 'label' of worker \d's rows has 1 value that is no class(?s:.)* 7\.0 in row \d+(?s:.)*has 3 outputs"
    with pytest.raises(DataError, match=told):
        tw.fit(lambda: nn.Linear(2, 3), frame, inputs=["x"], cluster=tw.Spark(workers=2), progress=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_cross_validation_chooses_between_two(digits: Any) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    net = estimator(optimizer="sgd", epochs=3, num_workers=2)
    grid = ParamGridBuilder().addGrid(net.learningRate, [0.2, 1e-6]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    chosen = CrossValidator(estimator=net, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2).fit(digits)
    assert chosen.avgMetrics[0] > chosen.avgMetrics[1] + 0.1
    assert chosen.bestModel.transform(digits.limit(3)).count() == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_parallel_cross_validation_shares_the_slots_and_every_fit_has_all_its_workers(digits: Any) -> None:
    """Three slots, four fits of two workers at once: without turns they would hold a slot each and wait for another."""
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    net = estimator(optimizer="sgd", epochs=1, num_workers=2)
    grid = ParamGridBuilder().addGrid(net.learningRate, [0.2, 1e-6]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuning = CrossValidator(
        estimator=net, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=4, collectSubModels=True
    )
    chosen = tuning.fit(digits.filter("number < 600"))
    models = [chosen.bestModel, *(model for fold in chosen.subModels for model in fold)]
    assert [model.summary["complete"] for model in models] == [True] * 5
    assert [model.summary["workers"] for model in models] == [2] * 5


@pytest.mark.long
def test_images_and_strings_are_trained_on(spark: Any) -> None:
    """horovod/horovod#3256, #2104: Spark's image schema as it is; strings through a transform."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        pixels = rng.integers(0, 100, (6, 6, 3), dtype=np.uint8) + (100 if i % 2 else 0)
        rows.append((("", 6, 6, 3, 16, bytearray(pixels.astype(np.uint8).tobytes())), "odd" if i % 2 else "even"))
    image = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
    frame = spark.createDataFrame(rows, f"image {image}, name string")

    def named(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"label": np.array([1 if n == "odd" else 0 for n in columns["name"]])}

    net = estimator(
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
        input_cols=["image"],
        transform=named,
        num_workers=2,
        epochs=8,
    )
    assert net.fit(frame).summary["train_loss"] < 0.5


@pytest.mark.long
def test_a_regression_adds_a_number(spark: Any) -> None:
    frame = spark.createDataFrame([(float(i % 7), 3.0 * (i % 7) + 1.0) for i in range(70)], "x double, y double")
    net = estimator(
        model=lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1), nn.Flatten(0)),
        input_cols=["x"],
        label_col="y",
        loss="mse",
        num_workers=2,
        epochs=60,
        optimizer="adam",
        learning_rate=0.1,
    )
    found = net.fit(frame).transform(frame).collect()
    assert max(abs(row.prediction - row.y) for row in found) < 0.5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_train_validation_split_chooses_between_two(digits: Any) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit

    net = estimator(epochs=2, num_workers=2, optimizer="sgd")
    grid = ParamGridBuilder().addGrid(net.learningRate, [0.2, 1e-6]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    chosen = TrainValidationSplit(estimator=net, estimatorParamMaps=grid, evaluator=evaluator, seed=1).fit(digits)
    assert chosen.validationMetrics[0] > chosen.validationMetrics[1] + 0.1


@pytest.mark.long
def test_parquet_files_are_read_where_they_lie(digits: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "digits.parquet")
    digits.select("pixels", "label").repartition(4).write.parquet(path)
    result = tw.fit(
        mlp, path, inputs=["pixels"], cluster=tw.Spark(workers=3, preflight=False), epochs=1, progress=False
    )
    assert result.summary["rows"] == 1797


@pytest.mark.long
def test_binary_columns_come_through_a_transform(digits: Any, spark: Any) -> None:
    packed = [(np.asarray(r.pixels, np.float32).tobytes(), r.label) for r in digits.limit(200).collect()]
    frame = spark.createDataFrame([(bytearray(b), y) for b, y in packed], "raw binary, label int")

    def unpacked(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"raw": np.stack([np.frombuffer(b, np.float32) for b in columns["raw"]])}

    result = tw.fit(
        mlp, frame, inputs=["raw"], transform=unpacked, cluster=tw.Spark(workers=2, preflight=False), progress=False
    )
    assert result.summary["rows"] == 200


def test_a_module_that_only_the_driver_has_travels_to_executors(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training takes it along, and so does prediction."""
    (tmp_path / "networks_of_mine.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10)\n\n    def forward(self, x):\n        return self.layer(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    network = importlib.import_module("networks_of_mine").Mine
    model = TorchEstimator(network, input_cols=["pixels"], label_col="label", num_workers=2, epochs=1).fit(digits)
    assert model.transform(digits.limit(5)).select("prediction").count() == 5
    assert len(model.transform(digits.limit(5)).collect()) == 5
