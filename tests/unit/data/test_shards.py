import datetime
import decimal
import os
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data import Shard, open_source, shards, write_shard
from thinwire.errors import DataError


def shard_of(tmp_path, data, **columns) -> Shard:
    """A shard of a table, or of Arrow columns, in as many chunks as it has."""
    table = pa.table(columns) if data is None else data
    path = str(tmp_path / "shard.arrow")
    assert write_shard(path, table.to_batches(), table.schema) == table.num_rows
    return Shard.open(path)


def chunked(table: pa.Table, cuts: list[int]) -> pa.Table:
    """The table with chunk borders at the given rows."""
    edges = sorted({0, table.num_rows, *(cut % (table.num_rows + 1) for cut in cuts)})
    pieces = [table.slice(a, b - a) for a, b in pairwise(edges)]
    return pa.concat_tables(pieces) if pieces else table


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
    data=st.data(),
)
def test_rows_come_back_in_the_order_asked_for_whatever_the_chunks(tmp_path_factory, num_rows, cuts, data):
    values = np.arange(num_rows * 6, dtype=np.float32).reshape(num_rows, 2, 3)
    arrays = {"x": values, "id": np.arange(num_rows), "even": np.arange(num_rows) % 2 == 0}
    table = open_source(arrays).table.append_column("name", pa.array([f"n{i}" for i in range(num_rows)]))
    path = str(tmp_path_factory.mktemp("shard") / "a")
    writer = shards.ShardWriter(path, table.schema, small_bytes=1)
    for batch in chunked(table, cuts).to_batches():
        writer.write(batch)
    assert writer.close() == num_rows
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=30)), np.int64)
    shard = Shard.open(path)
    taken = shard.take(rows)
    assert shard.num_rows == num_rows
    assert torch.equal(taken["x"], torch.from_numpy(values[rows]))
    assert taken["id"].tolist() == rows.tolist()
    assert taken["even"].tolist() == [row % 2 == 0 for row in rows]
    assert list(taken["name"]) == [f"n{row}" for row in rows]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)], ids=str)
def test_numbers_keep_their_dtype_and_shape(tmp_path, dtype, shape):
    values = (np.arange(4 * int(np.prod(shape))) % 3).astype(dtype).reshape(4, *shape)
    taken = shard_of(tmp_path, open_source({"x": values}).table).take(np.array([3, 0]))["x"]
    assert taken.dtype == getattr(torch, dtype)
    assert torch.equal(taken, torch.from_numpy(values[[3, 0]]))


def test_lists_of_one_length_become_tensors_even_when_nested_or_of_booleans(tmp_path):
    shard = shard_of(
        tmp_path,
        None,
        flat=pa.array([[1.0, 2.0], [3.0, 4.0]]),
        large=pa.array([[1], [2]], pa.large_list(pa.int16())),
        fixed=pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.uint8(), 3)),
        nested=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        flags=pa.array([[True, False], [False, False]]),
    )
    taken = shard.take(np.array([1, 0]))
    assert taken["flat"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert taken["large"].dtype == torch.int16
    assert taken["fixed"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert taken["nested"].shape == (2, 2, 2)
    assert taken["flags"].tolist() == [[False, False], [True, False]]
    assert taken["flags"].dtype == torch.bool


def test_a_tensor_column_stored_in_permuted_order_is_shown_in_logical_order(tmp_path):
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=(1, 0))
    storage = pa.array([[0, 1, 2, 3, 4, 5]], kind.storage_type)
    array = pa.ExtensionArray.from_storage(kind, storage)
    taken = shard_of(tmp_path, None, x=array).take(np.array([0]))["x"]
    assert taken.tolist() == array.to_numpy_ndarray().tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_ragged_lists_are_objects_and_the_first_odd_row_is_named(tmp_path):
    shard = shard_of(tmp_path, None, words=pa.array([[1, 2], [3, 4], [5], [6, 7]]))
    assert [row.tolist() for row in shard.take(np.array([2, 1]))["words"]] == [[5], [3, 4]]
    assert shard.why_no_tensor("words") == (
        "column 'words' has lists of different lengths: row 0 has 2 values, row 2 has 1"
    )


def test_nested_ragged_lists_are_traced_to_their_row(tmp_path):
    shard = shard_of(tmp_path, None, x=pa.array([[[1], [2]], [[3], [4, 5]]]))
    assert "row 1 has 2" in (shard.why_no_tensor("x") or "")


def test_lists_that_differ_only_between_chunks_are_ragged_too(tmp_path):
    path = str(tmp_path / "a")
    batches = [pa.record_batch({"x": pa.array([[1, 2]] * 3)}), pa.record_batch({"x": pa.array([[1]])})]
    writer = shards.ShardWriter(path, batches[0].schema, small_bytes=1)
    for batch in batches:
        writer.write(batch)
    writer.close()
    assert "row 0 has 2 values, row 3 has 1" in (Shard.open(path).why_no_tensor("x") or "")


def test_other_types_come_as_numpy_arrays_for_a_transform(tmp_path):
    when = datetime.datetime(2024, 5, 6)
    shard = shard_of(
        tmp_path,
        None,
        text=pa.array(["a", "b"]),
        raw=pa.array([b"x", b"yz"]),
        kind=pa.array(["u", "v"]).dictionary_encode(),
        when=pa.array([when, when]),
        price=pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]),
        point=pa.array([{"x": 1}, {"x": 2}]),
    )
    taken = shard.take(np.array([1]))
    assert taken["text"].tolist() == ["b"]
    assert taken["raw"].tolist() == [b"yz"]
    assert taken["kind"].tolist() == ["v"]
    assert taken["when"].dtype == np.dtype("datetime64[us]")
    assert taken["price"].tolist() == [decimal.Decimal("2.5")]
    assert taken["point"].tolist() == [{"x": 2}]
    assert shard.why_no_tensor("text") == "column 'text' holds string, not numbers"


def test_only_the_columns_asked_for_are_taken(tmp_path):
    shard = shard_of(tmp_path, None, a=[1, 2], b=[3, 4])
    assert shard.columns == ("a", "b")
    assert list(shard.take(np.array([0]), ["b"])) == ["b"]
    with pytest.raises(DataError, match=r"column 'bb' is not in the data. Did you mean 'b'"):
        shard.take(np.array([0]), ["bb"])


def test_taken_rows_do_not_alias_the_file(tmp_path):
    shard = shard_of(tmp_path, None, a=[1, 2])
    shard.take(np.array([0]))["a"].zero_()
    assert shard.take(np.array([0]))["a"].tolist() == [1]


@pytest.mark.parametrize(
    ("column", "count"),
    [
        (pa.array([1, None, 3, None]), 2),
        (pa.array([[1.0], [None], [2.0], [3.0]]), 1),
        (pa.array([[1, 2], None, [1, 2], [None, 2]], pa.list_(pa.int8(), 2)), 4),
        (pa.array(["a", None, "b", "c"]), 1),
        (pa.array([{"x": None}, {"x": 1}, {"x": 2}, {"x": 3}]), 1),
        (pa.array([None] * 4), 4),
        (pa.DictionaryArray.from_arrays([0, 1, 1, 0], pa.array(["a", None])), 2),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_nulls_are_refused_with_column_and_count_and_leave_no_file(tmp_path, column, count):
    table = pa.table({"fine": [1, 2, 3, 4], "age": column})
    if pa.types.is_fixed_size_list(column.type):
        count = shards._columns.count_nulls(column)  # a null row may or may not count its own values
    with pytest.raises(DataError, match=f"column 'age' has {count} null.* in rows 0 to 3"):
        write_shard(str(tmp_path / "a"), table.to_batches(), table.schema)
    assert os.listdir(tmp_path) == []


def test_a_failing_stream_leaves_no_file_and_keeps_the_old_one(tmp_path):
    batch = pa.record_batch({"a": [1]})

    def broken():
        yield batch
        raise RuntimeError("lost")

    path = str(tmp_path / "a")
    write_shard(path, [batch, batch], batch.schema)
    with pytest.raises(RuntimeError, match="lost"):
        write_shard(path, broken(), batch.schema)
    assert os.listdir(tmp_path) == ["a"]
    assert Shard.open(path).num_rows == 2


def test_a_batch_of_another_schema_is_refused_with_what_differs(tmp_path):
    first, second = pa.record_batch({"a": [1]}), pa.record_batch({"a": [1.5]})
    with pytest.raises(DataError, match=r"lacks 'a' \(int64\) and has 'a' \(double\) instead"):
        write_shard(str(tmp_path / "a"), [first, second], first.schema)


def test_a_name_used_twice_is_refused(tmp_path):
    table = pa.table([[1], [2]], names=["a", "a"])
    with pytest.raises(DataError, match="column 'a' is there more than once"):
        write_shard(str(tmp_path / "a"), table.to_batches(), table.schema)


def test_tiny_batches_are_joined_and_giant_ones_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "GIANT_BYTES", 4000)
    path = str(tmp_path / "a")
    tiny = [pa.record_batch({"a": np.arange(10)}) for _ in range(100)]
    giant = [pa.record_batch({"a": np.arange(10_000)})]
    writer = shards.ShardWriter(path, tiny[0].schema, small_bytes=1600)
    for batch in tiny + giant:
        writer.write(batch)
    writer.close()
    reader = pa.ipc.open_file(path)
    sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    assert sizes[:5] == [20 * 10] * 5
    assert sizes[5:] == [500] * 20
    assert [b.num_rows for b in shards.rechunk(iter(tiny), 1600)] == [200] * 5


def test_an_empty_shard_opens_and_gives_empty_columns(tmp_path):
    schema = open_source({"x": np.zeros((1, 2, 3), np.float32), "b": np.array([True])}).schema
    for batches in ([], [pa.RecordBatch.from_pylist([], schema=schema)]):
        assert write_shard(str(tmp_path / "a"), batches, schema) == 0
        shard = Shard.open(str(tmp_path / "a"))
        taken = shard.take(np.array([], np.int64))
        assert shard.num_rows == 0
        assert taken["x"].shape == (0, 2, 3)
        assert taken["b"].dtype == torch.bool


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "overwritten"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "a"
    batch = pa.record_batch({"a": np.arange(1000)})
    write_shard(str(path), [batch], batch.schema)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-100], "overwritten": b"\xff" * len(whole)}[damage])
    with pytest.raises(DataError, match=r"cannot be read as a shard .* Write it again"):
        Shard.open(str(path))
