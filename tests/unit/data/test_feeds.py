"""How rows reach a worker: streamed batches, and files fetched from the driver."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thinwire.data import Shard
from thinwire.data.feeds import PIECE_BYTES, Fetched, Server, Streamed, Wanted
from thinwire.data.split import ShardFiles
from thinwire.errors import DataError


def table(rows: int) -> pa.Table:
    x = [[float(i), float(-i)] for i in range(rows)]
    return pa.table({"x": pa.array(x, pa.list_(pa.float32())), "label": pa.array(range(rows), pa.int32())})


def wanted(**changes: Any) -> Wanted:
    return Wanted(columns=("x", "label"), validation=0.0, indicator=None, seed=3)._replace(**changes)


def streamed(given: pa.Table, chosen: Wanted, batch: int = 7, worker: int = 0) -> tuple[Shard, Shard | None]:
    feed = Streamed(given.schema, chosen)
    with feed.shard(worker, iter(given.to_batches(batch)), lambda name: iter(())) as files:
        train = Shard.open(files.train)
        assert train.num_rows == files.num_rows
        held = None if files.validation is None else Shard.open(files.validation)
        path = files.train
    assert not os.path.exists(path), "an opened shard needs its file no more, and leaves nothing behind"
    return train, held


def labels(shard: Shard) -> list[int]:
    return shard.take(np.arange(shard.num_rows), ["label"])["label"].tolist()  # type: ignore[union-attr]


def test_a_stream_becomes_a_shard_in_its_own_order() -> None:
    train, held = streamed(table(40), wanted())
    assert labels(train) == list(range(40))
    assert held is None


@pytest.mark.parametrize("rows", [0, 1, 5, 40, 101])
def test_a_share_is_held_back_and_every_row_is_in_one_place(rows: int) -> None:
    train, held = streamed(table(rows), wanted(validation=0.25))
    assert held is not None
    assert sorted(labels(train) + labels(held)) == list(range(rows))
    assert abs(held.num_rows - rows / 4) <= 1
    again, _ = streamed(table(rows), wanted(validation=0.25))
    assert labels(again) == labels(train), "a worker that comes back holds the same rows back"


def test_a_column_says_which_rows_are_for_validation() -> None:
    given = table(20).append_column("held", pa.array([i % 4 == 0 for i in range(20)]))
    train, held = streamed(given, wanted(indicator="held"))
    assert held is not None
    assert labels(held) == [0, 4, 8, 12, 16]
    assert train.columns == ("x", "label")
    with pytest.raises(DataError, match="'held' holds int64"):
        streamed(given.set_column(2, "held", pa.array(range(20))), wanted(indicator="held"))
    with pytest.raises(DataError, match="'held' has 1 null"):
        streamed(given.set_column(2, "held", pa.array([None] + [True] * 19)), wanted(indicator="held"))


def test_a_partition_without_rows_is_a_shard_without_rows() -> None:
    train, _ = streamed(table(0), wanted())
    assert train.num_rows == 0


def test_nulls_are_refused_with_column_and_count() -> None:
    given = pa.table({"x": pa.array([[1.0], [None], None]), "label": pa.array([1, 2, 3])})
    with pytest.raises(DataError, match="column 'x' has 2 nulls"):
        streamed(given, wanted())


def test_vectors_of_spark_ml_become_lists_and_decimals_become_doubles() -> None:
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [2], "values": [5.0]}
    for rows, expected in (
        ([dense, sparse], [[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]]),
        ([dense, dense], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]),
    ):
        given = pa.table({"x": pa.array(rows, kind), "label": pa.array([Decimal("0.5"), Decimal("1.5")])})
        train, _ = streamed(given, wanted(), batch=10)
        found = train.take(np.arange(2))
        assert found["x"].tolist() == expected
        assert found["label"].tolist() == [0.5, 1.5]


def test_files_are_fetched_piece_by_piece(tmp_path: Path) -> None:
    big = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 17)
    (tmp_path / "a").write_bytes(big)
    (tmp_path / "b").write_bytes(b"")
    server = Server([ShardFiles(str(tmp_path / "a"), str(tmp_path / "b"), 0, 0)])

    def fetch(name: str) -> Any:
        index, count = 0, 1
        while index < count:
            data, count = server.piece(0, name, index)
            index += 1
            yield data

    with Fetched(validated=True).shard(0, None, fetch) as files:
        assert Path(files.train).read_bytes() == big
        assert files.validation is not None
        assert Path(files.validation).read_bytes() == b""
