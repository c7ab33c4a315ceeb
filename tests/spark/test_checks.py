"""What a DataFrame cannot be trained on, or with, is refused on the driver, by `fit` and by `TorchEstimator`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import thinwire as tw
from thinwire.errors import DataError
from thinwire.spark import TorchEstimator

pytestmark = pytest.mark.timeout(600)
ROWS = [([float(i), 1.0], float(i % 3), i < 30) for i in range(40)]
SCHEMA = "x array<double>, label double, held boolean"


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, SCHEMA)


def estimator(**given: Any) -> TorchEstimator:
    settings = {
        "input_cols": ["x"],
        "num_workers": 2,
        "progress": False,
        "cluster": tw.Spark(workers=2, preflight=False),
    }
    return TorchEstimator(given.pop("model", lambda: nn.Linear(2, 3)), **(settings | given))


def test_a_dataframe_of_no_rows_is_refused(frame: Any) -> None:
    with pytest.raises(DataError, match="there are no rows to train on"):
        estimator().fit(frame.filter("label > 9"))
    with pytest.raises(DataError, match="there are no rows to train on"):
        estimator(validation_indicator_col="held").fit(frame.filter("held"))
    with pytest.raises(DataError, match="there are no rows to train on"):
        tw.fit(lambda: nn.Linear(2, 3), frame.filter("label > 9"), inputs=["x"], cluster=tw.Spark(workers=2))


def test_waiting_for_an_evaluation_of_no_rows_is_refused(frame: Any) -> None:
    with pytest.raises(DataError, match=r"until \(val_loss <= 0.1\) is measured on validation rows, and no"):
        estimator(validation_indicator_col="held", until="val_loss <= 0.1").fit(frame.filter("not held"))


def test_labels_that_are_all_the_same_are_warned_of(frame: Any) -> None:
    with pytest.warns(UserWarning, match="is 1.0 in all of 13 rows: there is nothing to tell apart"):
        fitted = estimator().fit(frame.filter("label = 1"))
    assert fitted.summary["complete"]


def test_columns_that_do_not_fit_the_model_are_refused(frame: Any, spark: Any) -> None:
    with pytest.raises(DataError, match=r"cannot take a row of inputs=\['x'\].*in the shape \(2,\) a row"):
        estimator(model=lambda: nn.Linear(5, 3)).fit(frame)
    apart = spark.createDataFrame([(1.0, 2.0, 0.0), (2.0, 1.0, 1.0)], "a double, b double, label double")
    with pytest.raises(DataError, match=r"called with 2 tensors of one number a row.*VectorAssembler"):
        estimator(input_cols=["a", "b"]).fit(apart)
    words = spark.createDataFrame([("a", 0.0), ("b", 1.0)], "x string, label double")
    with pytest.raises(DataError, match=r"column 'x'.*must be numbers"):
        estimator().fit(words)


def test_recipes_forms_train_an_estimator(frame: Any, tmp_path: Any) -> None:
    schedule = {"name": "cosine", "T_max": 2}
    made = estimator(optimizer={"name": "sgd", "momentum": 0.9}, learning_rate=0.1, scheduler=schedule, epochs=2)
    assert made.fit(frame).summary["epochs"] == 2.0
    saved = TorchEstimator("mlp", input_cols=["x"], optimizer={"name": "adam", "lr": 0.1}, scheduler=schedule)
    saved.save(str(tmp_path / "made"))
    again = TorchEstimator.load(str(tmp_path / "made"))
    assert again.getOrDefault(again.optimizer) == {"name": "adam", "lr": 0.1}
    assert again.getOrDefault(again.fitOptions)["scheduler"] == schedule
