"""A table's encoder: indices of categories, standardised numbers, nulls told apart, and all of it plain data."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import thinwire as tw
from thinwire.data import Shard, write_shard
from thinwire.data.tables import TableEncoder
from thinwire.errors import ConfigError, DataError

FRAME = pd.DataFrame(
    {
        "carrier": ["UA", "B6", None, "UA", "AA", "B6", "UA"],
        "hour": [5, 6, 5, 7, 5, 6, 5],
        "distance": [100.0, np.nan, 300.0, 100.0, 300.0, 100.0, 300.0],
        "label": [0, 1, 0, 1, 0, 1, 1],
    }
)
ENCODER = tw.TableEncoder(categorical=["carrier", "hour"], numeric=["distance"])


def batch_of(data: Any, folder: Any) -> dict[str, Any]:
    """A batch as a worker reads it."""
    table = data if isinstance(data, pa.Table) else pa.Table.from_pandas(data, preserve_index=False)
    table = table.replace_schema_metadata(None)
    path = str(folder / "rows")
    write_shard(path, table.combine_chunks().to_batches(), table.schema, nullable=True)
    return Shard.open(path).take(np.arange(len(table)))


def test_frequent_categories_come_first_and_nulls_and_unseen_ones_have_indices_of_their_own(tmp_path: Any) -> None:
    encoder = ENCODER.fit(FRAME)
    assert encoder.vocabularies == {"carrier": ("UA", "B6", "AA"), "hour": (5, 6, 7)}
    assert encoder.shape == {"sizes": {"carrier": 5, "hour": 5}, "numbers": {"distance": 1}}
    other = pd.DataFrame({"carrier": ["AA", None, "XX", "UA"], "hour": [7, 5, 99, 6], "distance": [1.0, 2.0, 3.0, 4.0]})
    found = encoder(batch_of(other, tmp_path))
    assert found["carrier"].tolist() == [4, 0, 1, 2]
    assert found["hour"].tolist() == [4, 2, 1, 3]
    assert found["carrier"].dtype == torch.int64


def test_numbers_are_standardised_and_nulls_become_the_mean(tmp_path: Any) -> None:
    encoder = ENCODER.fit(FRAME)
    mean, deviation = encoder.scales["distance"]
    assert (mean, deviation) == (pytest.approx(200.0), pytest.approx(100.0))
    found = encoder(batch_of(FRAME, tmp_path))["distance"]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([-1, 0, 1, -1, 1, -1, 1])


@pytest.mark.parametrize("fill", [500.0, {"distance": 500}])
def test_nulls_may_be_filled_with_a_number_and_flagged(tmp_path: Any, fill: Any) -> None:
    encoder = tw.TableEncoder(numeric=["distance"], fill=fill, flag_nulls=True).fit(FRAME)
    found = encoder(batch_of(FRAME, tmp_path))["distance"]
    assert found.tolist()[:2] == [[-1.0, 0.0], [3.0, 1.0]]
    assert encoder.shape["numbers"] == {"distance": 2}


def test_rare_categories_share_the_index_of_unseen_ones() -> None:
    encoder = tw.TableEncoder(categorical=["carrier"], min_count=2).fit(FRAME)
    assert encoder.vocabularies == {"carrier": ("UA", "B6")}
    assert tw.TableEncoder(categorical=["carrier"], most_categories=1).fit(FRAME).vocabularies == {"carrier": ("UA",)}


@pytest.mark.parametrize(
    "data",
    [
        FRAME.sample(frac=1, random_state=1),
        pa.Table.from_pandas(FRAME, preserve_index=False),
        pa.Table.from_pandas(FRAME, preserve_index=False).set_column(
            0, "carrier", pa.array(FRAME["carrier"]).dictionary_encode()
        ),
        pa.Table.from_pandas(FRAME.astype({"hour": "float64"}), preserve_index=False),
        pa.Table.from_pandas(FRAME, preserve_index=False).to_batches(max_chunksize=2),
    ],
    ids=["rows in another order", "Arrow", "a dictionary", "whole floats", "record batches"],
)
def test_an_encoder_is_the_same_from_any_form_of_the_same_rows(data: Any) -> None:
    assert ENCODER.fit(data) == ENCODER.fit(FRAME)


def test_an_encoder_is_fitted_on_files(tmp_path: Any) -> None:
    FRAME.to_parquet(tmp_path / "rows.parquet")
    assert ENCODER.fit(str(tmp_path / "*.parquet")) == ENCODER.fit(FRAME)


def test_whole_numbers_that_doubles_cannot_hold_stay_apart_beside_nulls(tmp_path: Any) -> None:
    keys = [2**60, 2**60 + 1, None, 2**60 + 1, 7]
    table = pa.table({"user": pa.array(keys, pa.int64())})
    encoder = tw.TableEncoder(categorical=["user"]).fit(table)
    assert encoder(batch_of(table, tmp_path))["user"].tolist() == [3, 2, 0, 2, 4]


def test_booleans_and_decimals_are_categories_and_numbers(tmp_path: Any) -> None:
    from decimal import Decimal

    table = pa.table(
        {
            "new": pa.array([True, None, False, True]),
            "price": pa.array([Decimal("1.50"), None, Decimal("2.50"), Decimal("2.00")]),
        }
    )
    encoder = tw.TableEncoder(categorical=["new"], numeric=["price"]).fit(table)
    assert encoder.vocabularies == {"new": (1, 0)}
    assert encoder.scales["price"][0] == pytest.approx(2.0)
    assert encoder({"new": np.array([True, False]), "price": np.array([2.0, 2.0])})["new"].tolist() == [2, 3]


def test_columns_without_one_value_are_encoded_as_nulls(tmp_path: Any) -> None:
    table = pa.table({"c": pa.array([None, None], pa.string()), "n": pa.array([None, None], pa.float64())})
    encoder = tw.TableEncoder(categorical=["c"], numeric=["n"]).fit(table)
    found = encoder(batch_of(table, tmp_path))
    assert found["c"].tolist() == [0, 0]
    assert found["n"].tolist() == [0.0, 0.0]


def test_a_constant_column_and_one_with_infinity_give_finite_numbers(tmp_path: Any) -> None:
    table = pa.table({"same": [0.1] * 3, "wild": [1.0, np.inf, 3.0]})
    found = tw.TableEncoder(numeric=["same", "wild"]).fit(table)(batch_of(table, tmp_path))
    assert found["same"].tolist() == pytest.approx([0.0] * 3)
    assert found["wild"].tolist() == [-1.0, 0.0, 1.0]


def test_other_columns_go_through_as_they_are() -> None:
    assert ENCODER.fit(FRAME)({**{c: FRAME[c].to_numpy() for c in FRAME}, "label": "as it is"})["label"] == "as it is"


def test_an_encoder_is_plain_data_and_comes_back_from_it(tmp_path: Any) -> None:
    encoder = tw.TableEncoder(categorical=["carrier"], numeric=["distance"], fill={"distance": 1}).fit(FRAME)
    again = TableEncoder.of_state(json.loads(json.dumps(encoder.state())))
    assert again == encoder
    assert pickle.loads(pickle.dumps(encoder)) == encoder
    assert TableEncoder.of_state(ENCODER.state()) == ENCODER
    batch = batch_of(FRAME, tmp_path)
    assert torch.equal(again(batch)["carrier"], encoder(batch)["carrier"])


@pytest.mark.parametrize(
    "change",
    [
        {"vocabularies": {"carrier": ["UA", "UA"]}},
        {"vocabularies": {"carrier": ["UA", 1]}},
        {"vocabularies": {"carrier": [True]}},
        {"vocabularies": {"carrier": [2**70]}},
        {"vocabularies": {"carrier": "UA"}},
        {"vocabularies": {"other": ["UA"]}},
        {"vocabularies": None},
        {"scales": {"distance": [0.0, 0.0]}},
        {"scales": {"distance": [float("nan"), 1.0]}},
        {"scales": {"distance": ["0", 1.0]}},
        {"scales": {"distance": [0.0]}},
        {"categorical": [1]},
        {"min_count": 0},
        {"call": "os.system"},
    ],
    ids=str,
)
def test_a_state_that_no_encoder_gave_is_refused(change: dict[str, Any]) -> None:
    state = tw.TableEncoder(categorical=["carrier"], numeric=["distance"]).fit(FRAME).state()
    with pytest.raises(ConfigError):
        TableEncoder.of_state(state | change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "has no columns"),
        ({"categorical": ["a"], "numeric": ["a"]}, "column 'a' twice"),
        ({"categorical": [1]}, "categorical = .* is not possible"),
        ({"numeric": ["a"], "fill": {"b": 1.0}}, "fill.b is not a setting"),
        ({"numeric": ["a"], "fill": "mean"}, "fill = 'mean' is not possible"),
        ({"numeric": ["a"], "min_count": 0}, "min_count = 0 is too small"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_are_not_possible_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tw.TableEncoder(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numeric": ["carrier"]}, "'carrier' holds .*string.* has it as numeric; numbers and booleans can be"),
        ({"categorical": ["share"]}, r"'share' holds 0.5 \(float\), which cannot be a category.*as numeric, or cast"),
        ({"categorical": ["day"]}, "'day' holds timestamp.* has it as categorical"),
        ({"numeric": ["distnce"]}, "'distnce' is not in the data.*'distance'"),
    ],
    ids=["text as a number", "shares as categories", "a timestamp", "a typo"],
)
def test_a_column_that_cannot_be_encoded_is_told_of_when_the_encoder_is_fitted(
    settings: dict[str, Any], message: str
) -> None:
    frame = FRAME.assign(share=0.5, day=pd.Timestamp("2013-01-01"))
    with pytest.raises(DataError, match=message):
        tw.TableEncoder(**settings).fit(frame)


def test_a_column_of_another_kind_than_the_encoder_has_seen_is_refused(tmp_path: Any) -> None:
    """It would pass for a column of categories that were never seen."""
    encoder = ENCODER.fit(FRAME)
    rows = {"carrier": np.array([1, 2]), "hour": np.array([5, 6]), "distance": np.array([1.0, 2.0])}
    with pytest.raises(DataError, match="'carrier' holds 1, and held text when the encoder was fitted"):
        encoder(rows)
    with pytest.raises(DataError, match="'hour' holds '5', and held whole numbers"):
        encoder(rows | {"carrier": np.array(["UA", "AA"], object), "hour": np.array(["5", "6"], object)})


def test_an_encoder_that_has_seen_no_data_says_so() -> None:
    with pytest.raises(ConfigError, match=r"is not fitted; use the encoder that encoder.fit\(data\) returns"):
        ENCODER({name: np.zeros(2) for name in ENCODER.columns})
