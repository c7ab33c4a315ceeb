"""Nulls reach a transform, which fills them; what it leaves is told of, and without one they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.data import Loader, Position, Sampler, Shard, write_shard
from thinwire.errors import DataError

COLUMNS = {
    "byte": pa.array([1, None, 3, 4], pa.int8()),
    "long": pa.array([1, None, 3, 4], pa.int64()),
    "key": pa.array([2**60 + 1, None, 3, 4], pa.int64()),
    "small": pa.array([0.5, None, 1.5, 2.5], pa.float32()),
    "real": pa.array([0.5, None, 1.5, 2.5], pa.float64()),
    "flag": pa.array([True, None, False, True]),
    "word": pa.array(["a", None, "b", "c"]),
    "list": pa.array([[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]]),
    "whole": pa.array([1, 2, 3, 4], pa.int64()),
}


def shard_of(folder: Any, columns: dict[str, Any], pieces: int = 1) -> Shard:
    table, path = pa.table(columns), str(folder / "rows")
    size = len(table) // pieces
    batches = [b for i in range(pieces) for b in table.slice(i * size, size).combine_chunks().to_batches()]
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return Shard.open(path)


@pytest.mark.parametrize("pieces", [1, 2], ids=["one record batch", "nulls in the first of two"])
def test_nulls_are_nan_in_columns_of_numbers_and_none_in_others(tmp_path: Any, pieces: int) -> None:
    columns = {name: column for name, column in COLUMNS.items() if name != "flag"}
    shard = shard_of(tmp_path, columns, pieces)
    assert shard.with_nulls == set(columns) - {"whole"}
    found = shard.take(np.array([3, 1, 0]))
    for name, dtype in {"byte": "float64", "long": "float64", "small": "float32", "real": "float64"}.items():
        assert found[name].dtype == getattr(torch, dtype), name
        assert found[name].isnan().tolist() == [False, True, False], name
    assert found["long"][0] == 4
    assert list(found["key"]) == [4, None, 2**60 + 1], "doubles would lose digits"
    assert list(found["word"]) == ["c", None, "a"]
    assert found["list"][1] is None
    assert found["list"][0].tolist() == [5.0, 6.0]
    assert found["whole"].dtype == torch.int64


def test_a_shard_is_written_with_nulls_where_a_transform_fills_them(tmp_path: Any) -> None:
    table = pa.table(COLUMNS)
    path = str(tmp_path / "rows")
    with pytest.raises(DataError, match="column 'word' has 1 null"):
        write_shard(path, table.to_batches(), table.schema, nullable=tuple(n for n in COLUMNS if n != "word"))
    assert write_shard(path, table.to_batches(), table.schema, nullable=True) == 4
    flag = Shard.open(path).take(np.arange(4))["flag"]
    assert flag.dtype == torch.float64
    assert flag.nan_to_num(9.0).tolist() == [1.0, 9.0, 0.0, 1.0]


def loader_of(folder: Any, transform: Any, column: str) -> Loader:
    shard = shard_of(folder, {"x": COLUMNS[column]})
    return Loader(shard, Sampler(4, 4, 0, 0), inputs=["x"], label=None, transform=transform, prefetch=0)


def test_what_the_transform_fills_is_trained_on(tmp_path: Any) -> None:
    batch = next(loader_of(tmp_path, lambda c: {"x": torch.nan_to_num(c["x"], -1.0)}, "long").batches(Position(), 1))
    assert sorted(batch.inputs[0].tolist()) == [-1.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("column", ["long", "small"])
def test_what_the_transform_leaves_is_told_of_with_column_and_count(tmp_path: Any, column: str) -> None:
    with pytest.raises(DataError, match=r"column 'x' has nulls in its data, and 1 NaN after the transform.*fill them"):
        next(loader_of(tmp_path, lambda c: c, column).batches(Position(), 1))


ROWS = 64
X = np.arange(ROWS, dtype=np.float64)
TABLE = pa.table(
    {
        "x": pa.array([None if i % 5 == 0 else float(i) for i in range(ROWS)]),
        "label": pa.array([i % 2 for i in range(ROWS)]),
    }
)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(-1, 1) / ROWS)


def fitted(transform: Any, data: Any = TABLE, **more: Any) -> tw.Result:
    settings: dict[str, Any] = {"cluster": tw.Simulated(workers=2, step_s=0.01), "batch_size": 8, "validation": 0.25}
    return tw.fit(Wide, data, inputs=["x"], transform=transform, progress=False, **(settings | more))


def fill(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "x": torch.nan_to_num(torch.as_tensor(columns["x"]), 0.0)}


def test_fit_gives_nulls_to_a_transform_in_training_and_validation() -> None:
    result = fitted(fill)
    assert np.isfinite(result.summary["val_loss"])
    assert result.summary["rows"] == 48


def test_a_transform_may_fill_the_label_too() -> None:
    table = pa.table({"x": X, "label": pa.array([None if i % 4 == 0 else i % 2 for i in range(ROWS)])})

    def ignored(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "label": torch.nan_to_num(torch.as_tensor(columns["label"]), -100.0)}

    assert fitted(ignored, table, validation=None).summary["rows"] == ROWS


def test_a_transform_that_leaves_nulls_ends_the_run_with_the_column_s_name() -> None:
    with pytest.raises(DataError, match="column 'x' has nulls in its data"):
        fitted(lambda columns: columns)


def test_without_a_transform_nulls_are_refused_as_before() -> None:
    with pytest.raises(DataError, match=r"column 'x' has 13 nulls.*a transform that fills them"):
        fitted(None)


def test_vectors_of_spark_ml_keep_the_rows_beside_a_null() -> None:
    from thinwire.data.columns import prepared

    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    rows = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
        None,
        {"type": 0, "size": 2, "indices": [1], "values": [5.0]},
    ]
    batch = pa.RecordBatch.from_arrays([pa.array(rows, kind)], names=["v"])
    assert prepared(batch, ["v"]).column("v").to_pylist() == [[1.0, 2.0], None, [0.0, 5.0]]
