import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data import Shard, ShardFiles, open_source, shards, split
from thinwire.errors import ConfigError, DataError


def ids(path: str | None) -> list[int]:
    if path is None:
        return []
    shard = Shard.open(path)
    return shard.take(np.arange(shard.num_rows), ["id"])["id"].tolist()


def flat(parts) -> list[int]:
    return sorted(row for part in parts for row in part)


def batched(num_rows: int, sizes: list[int]) -> list[pa.RecordBatch]:
    """Rows 0 to num_rows - 1 in batches of the given sizes, used over and over."""
    batches, start, turn = [], 0, 0
    while start < num_rows:
        size = min(sizes[turn % len(sizes)], num_rows - start)
        batches.append(pa.record_batch({"id": np.arange(start, start + size)}))
        start, turn = start + size, turn + 1
    return batches


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 150),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    workers=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    fraction=st.sampled_from([None, 0.0, 0.1, 0.25, 0.5, 0.9]),
    small_bytes=st.sampled_from([1, 100, shards.SMALL_BYTES]),
)
def test_every_row_lands_in_exactly_one_shard(tmp_path_factory, num_rows, sizes, workers, seed, fraction, small_bytes):
    num_held = round((fraction or 0) * num_rows)
    source = open_source(batched(num_rows, sizes))
    options = {"workers": workers, "validation": fraction, "seed": seed}
    directory = str(tmp_path_factory.mktemp("shards"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.rechunk, "__defaults__", (small_bytes,))
        if num_held == num_rows:
            with pytest.raises(DataError, match="leaves none to train on"):
                split(source, directory=directory, **options)
            return
        files = split(source, directory=directory, **options)
        again = split(source, directory=str(tmp_path_factory.mktemp("again")), **options)
    train, held = [ids(file.train) for file in files], [ids(file.validation) for file in files]
    assert flat(train + held) == list(range(num_rows))
    assert sum(map(len, held)) == num_held
    assert [(file.num_rows, file.num_validation_rows) for file in files] == [
        (len(a), len(b)) for a, b in zip(train, held, strict=True)
    ]
    for shares in (train, held):
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [ids(file.train) for file in again] == train
    assert [ids(file.validation) for file in again] == held
    assert all((file.validation is None) == (not fraction) for file in files)


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, 50), num_apart=st.integers(0, 50), workers=st.integers(1, 7))
def test_a_validation_source_is_dealt_out_the_same_way(tmp_path_factory, num_rows, num_apart, workers):
    apart = open_source(pa.table({"id": np.arange(1000, 1000 + num_apart)}))
    source = open_source({"id": np.arange(num_rows)})
    directory = str(tmp_path_factory.mktemp("shards"))
    files = split(source, workers=workers, directory=directory, validation=apart)
    assert flat(ids(file.train) for file in files) == list(range(num_rows))
    held = [ids(file.validation) for file in files]
    assert flat(held) == list(range(1000, 1000 + num_apart))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert [file.num_validation_rows for file in files] == [len(part) for part in held]


def test_a_file_sorted_by_label_gives_every_worker_every_label(tmp_path):
    source = open_source({"id": np.repeat(np.arange(10), 50)})
    for file in split(source, workers=4, directory=str(tmp_path)):
        assert set(ids(file.train)) == set(range(10))


def test_the_seed_changes_shards_and_validation_rows(tmp_path):
    source = open_source({"id": np.arange(100)})
    first, second = (
        split(source, workers=2, directory=str(tmp_path / str(seed)), validation=0.2, seed=seed) for seed in (0, 1)
    )
    assert ids(first[0].train) != ids(second[0].train)
    assert set(ids(first[0].validation)) != set(ids(second[0].validation))


def test_more_workers_than_rows_leaves_some_shards_empty(tmp_path):
    files = split(open_source({"id": [4, 5]}), workers=5, directory=str(tmp_path / "new" / "folder"))
    assert [file.num_rows for file in files] == [1, 1, 0, 0, 0]
    assert [Shard.open(file.train).num_rows for file in files] == [1, 1, 0, 0, 0]
    assert files[4] == ShardFiles(str(tmp_path / "new" / "folder" / "train-00004.arrow"), None, 0, 0)


def test_only_the_columns_asked_for_are_written_and_nulls_elsewhere_do_no_harm(tmp_path):
    table = pa.table({"id": [1, 2], "x": [1.0, 2.0], "age": [None, 3]})
    (file,) = split(open_source(table), workers=1, directory=str(tmp_path), columns=["x", "id"])
    assert Shard.open(file.train).columns == ("x", "id")


def test_nulls_are_told_by_row_of_the_source_and_nothing_is_left_behind(tmp_path):
    batches = [pa.record_batch({"id": pa.array(part)}) for part in ([1, 2, 3], [4, None, 6])]
    with pytest.raises(DataError, match="column 'id' has 1 null in rows 3 to 5"):
        split(open_source(batches), workers=2, directory=str(tmp_path), validation=0.5)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("share", [-0.1, 1, 1.0, 7, float("nan")])
def test_a_share_outside_zero_to_one_is_refused(tmp_path, share):
    with pytest.raises(ConfigError, match=r"validation is .* at least 0 and below 1"):
        split(open_source({"id": [1]}), workers=1, directory=str(tmp_path), validation=share)


def test_other_impossible_requests_are_refused(tmp_path):
    source, directory = open_source({"id": [1]}), str(tmp_path)
    with pytest.raises(ConfigError, match="workers is 0"):
        split(source, workers=0, directory=directory)
    with pytest.raises(ConfigError, match="seed is -1"):
        split(source, workers=1, directory=directory, seed=-1)
    with pytest.raises(DataError, match="the data has 0 rows"):
        split(open_source(pa.table({"id": pa.array([], pa.int64())})), workers=1, directory=directory)
    with pytest.raises(DataError, match=r"the validation data lacks 'id' \(int64\)"):
        split(source, workers=1, directory=directory, validation=open_source({"id": [1.5]}))


@dataclass(frozen=True)
class Liar:
    """A source that gives another number of rows than it says."""

    num_rows: int
    transform: None = None

    @property
    def schema(self):
        return pa.schema({"id": pa.int64()})

    def batches(self):
        yield pa.record_batch({"id": [1, 2, 3]})


@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_source_whose_rows_do_not_add_up_is_refused(tmp_path, num_rows):
    with pytest.raises(DataError, match=f"reported {num_rows} rows and gave 3"):
        split(open_source(Liar(num_rows)), workers=1, directory=str(tmp_path), validation=0.5)
    assert os.listdir(tmp_path) == []
