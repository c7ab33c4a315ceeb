"""A table with text and nulls through TorchEstimator: trained, saved, loaded without code, and predicted."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

import thinwire as tw
from tests.e2e.test_tables import ENCODER, FRAME
from thinwire.errors import ConfigError, DataError
from thinwire.spark import TorchEstimator, TorchModel


@pytest.fixture
def frame(spark: Any) -> Any:
    rows = FRAME.astype(object).where(FRAME.notna(), None).values.tolist()
    return spark.createDataFrame(rows, "carrier string, hour bigint, distance double, late bigint, comment string")


def estimator(**more: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "transform": ENCODER,
        "label_col": "late",
        "loss": "bce_with_logits",
        "optimizer": {"name": "adam", "lr": 0.02},
        "strategy": tw.Synchronous(),
        "num_workers": 2,
        "epochs": 6,
        "batch_size": 32,
        "progress": False,
    }
    return TorchEstimator("deepfm", **(settings | more))


def test_an_encoder_is_the_same_from_a_spark_frame_as_from_pandas(frame: Any) -> None:
    for encoder in (ENCODER, tw.TableEncoder(categorical=["hour", "late"], min_count=70, most_categories=9)):
        assert encoder.fit(frame) == encoder.fit(FRAME)
    assert ENCODER.fit(frame.repartition(3)) == ENCODER.fit(FRAME)


def test_what_cannot_be_encoded_is_told_of_on_spark(frame: Any) -> None:
    day = frame.withColumn("day", F.lit(datetime.date(2013, 1, 1))).withColumn("share", F.lit(0.5))
    with pytest.raises(DataError, match="'day' holds date, and the encoder has it as categorical"):
        tw.TableEncoder(categorical=["day"]).fit(day)
    with pytest.raises(DataError, match=r"'share' holds 0.5"):
        tw.TableEncoder(categorical=["share"]).fit(day)
    with pytest.raises(DataError, match=r"'carier' is not in the data.*'carrier'"):
        tw.TableEncoder(categorical=["carier"]).fit(day)
    kinds = frame.select(
        F.lit(True).alias("flag"), F.lit(2.0).alias("whole"), F.lit("1.50").cast("decimal(5,2)").alias("price")
    )
    found = tw.TableEncoder(categorical=["flag", "whole"], numeric=["price"]).fit(kinds)
    assert found.vocabularies == {"flag": (1,), "whole": (2,)}
    assert found.scales == {"price": (1.5, 1.0)}


def test_a_table_is_trained_saved_and_predicted_with_nulls_and_categories_never_seen(
    frame: Any, spark: Any, tmp_path: Path
) -> None:
    fitted = Pipeline(stages=[estimator()]).fit(frame)
    right = fitted.transform(frame).where("prediction = late").count() / frame.count()
    assert right > 0.85
    fitted.write().overwrite().save(str(tmp_path / "model"))
    assert "pickle" not in "".join(p.read_text() for p in tmp_path.rglob("metadata/part-*"))
    again = PipelineModel.load(str(tmp_path / "model"))
    odd = spark.createDataFrame(
        [("ZZ", 20, 900.0), (None, None, None), ("B6", 20, 900.0)], "carrier string, hour bigint, distance double"
    )
    one, other = ([r["rawPrediction"] for r in model.transform(odd).collect()] for model in (fitted, again))
    assert one == other
    assert isinstance(again.stages[0], TorchModel)
    assert again.stages[0].getInputCols() == ["carrier", "hour", "distance"]


@pytest.mark.long
def test_rows_held_back_by_a_column_are_not_fitted_on(frame: Any) -> None:
    held = frame.withColumn("held", F.col("hour") > 12)
    fitted = estimator(validation_indicator_col="held", epochs=1).fit(held)
    assert max(fitted._user.vocabularies["hour"]) == 12


@pytest.mark.long
def test_an_estimator_with_an_encoder_is_saved_as_data_and_fits_anew(frame: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    estimator(epochs=1).save(path)
    again = TorchEstimator.load(path)
    assert again.getOrDefault("fitOptions")["transform"] == ENCODER
    assert again.fit(frame).getInputCols() == ["carrier", "hour", "distance"]


@pytest.mark.long
def test_a_transform_of_ones_own_sees_nulls_in_training_and_in_prediction(frame: Any) -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.reshape(-1, 1) / 1000)

    def fill(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "distance": torch.nan_to_num(torch.as_tensor(columns["distance"]), 800.0)}

    settings: dict[str, Any] = {"input_cols": ["distance"], "label_col": "late", "num_workers": 2, "progress": False}
    some = frame.select("distance", "late")
    fitted = TorchEstimator(Net, transform=fill, **settings).fit(some)
    assert fitted.transform(some).where("prediction is not null").count() == some.count()
    with pytest.raises(DataError, match="column 'distance' has nulls in its data"):
        TorchEstimator(Net, transform=lambda columns: columns, **settings).fit(some)


def test_an_estimator_refuses_an_encoder_of_other_columns_than_its_inputs(frame: Any) -> None:
    with pytest.raises(ConfigError, match="has column 'carrier', which is not among inputs"):
        estimator(input_cols=["hour", "distance"]).fit(frame)
    with pytest.raises(ConfigError, match="label_col = 'hour' is a column of the TableEncoder"):
        estimator(label_col="hour").fit(frame)
