import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from thinwire.data import Source, open_source, select
from thinwire.errors import DataError


def rows(source: Source) -> list[dict]:
    table = pa.Table.from_batches(source.batches(), source.schema)
    assert table.num_rows == source.num_rows
    return table.to_pylist()


TABLE = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})


@pytest.mark.parametrize(
    "data",
    [TABLE, TABLE.to_batches()[0], TABLE.to_batches(max_chunksize=2), {"a": [1, 2, 3], "b": ["x", "y", "z"]}],
    ids=["table", "batch", "batches", "dict"],
)
def test_arrow_data_and_dicts_are_taken_as_they_are(data):
    source = open_source(data)
    assert rows(source) == TABLE.to_pylist()
    assert source.transform is None
    assert open_source(source) is source


def test_arrays_of_several_dimensions_become_tensor_columns_without_a_copy():
    array = np.arange(24, dtype=np.int16).reshape(4, 2, 3)
    source = open_source({"x": array, "y": torch.arange(4), "z": np.arange(8).reshape(2, 4).T[:, ::-1]})
    assert source.schema.field("x").type == pa.fixed_shape_tensor(pa.int16(), (2, 3))
    assert source.schema.field("y").type == pa.int64()
    (batch,) = source.batches()
    assert batch.column("x").storage.flatten().buffers()[1].address == array.ctypes.data
    assert batch.column("z").to_pylist() == [[4, 0], [5, 1], [6, 2], [7, 3]]


def test_unusual_arrays_are_converted():
    source = open_source(
        {
            "brain": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
            "swapped": np.array([1, 2], ">i4"),
            "ragged": [[1], [2, 3]],
            "text": np.array(["a", "b"], object),
            "when": np.array(["2024-01-01", "2024-01-02"], "datetime64[s]"),
        }
    )
    first = rows(source)[0]
    assert (first["brain"], first["swapped"], first["ragged"], first["text"]) == (1.0, 1, [1], "a")
    assert first["when"].year == 2024


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (np.zeros((2, 3)), ["features", "label"]),
        (torch.zeros(2, 3), ["features", "label"]),
        ((np.zeros(2), torch.zeros(2)), ["features_0", "features_1", "label"]),
        ([np.zeros(2)], ["features_0", "label"]),
        ([[1.0, 2.0], [3.0, 4.0]], ["features", "label"]),
    ],
)
def test_a_pair_of_arrays_is_named_features_and_label(features, names):
    assert open_source((features, np.arange(2))).schema.names == names


@pytest.mark.parametrize(
    ("count", "names"),
    [(1, ["features"]), (2, ["features", "label"]), (3, ["features_0", "features_1", "label"])],
)
def test_the_last_tensor_of_a_tensor_dataset_is_the_label(count, names):
    data = torch.utils.data.TensorDataset(*[torch.zeros(2, 1)] * count)
    assert open_source(data).schema.names == names


def test_a_pandas_frame_comes_without_its_index():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]}, index=[7, 8, 9])
    assert rows(open_source(frame)) == TABLE.to_pylist()


def test_anything_that_exports_an_arrow_stream_is_a_table():
    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return TABLE.__arrow_c_stream__(requested_schema)

    assert rows(open_source(Frame())) == TABLE.to_pylist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data is a builtins.int; a path, .* is allowed"),
        ([], "data is a builtins.list"),
        ({}, "dict of arrays is empty"),
        ((1, 2, 3), "tuple of 3; a pair"),
        ({"a": [1], "b": [1, 2]}, "differ in length .*'a': 1, 'b': 2"),
        ({"a": 5}, r"'a' has shape \(\)"),
        ({"a": np.zeros((2, 0))}, r"'a' has shape \(2, 0\)"),
        ({"a": np.zeros(2, complex)}, "'a' of complex128 cannot be a column"),
        ([TABLE.to_batches()[0], pa.record_batch({"a": [1]})], "record batch 1 lacks 'b'"),
    ],
    ids=str,
)
def test_data_that_cannot_be_rows_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        open_source(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two Parquet files of Spark's making, with its marker files beside them."""
    pq.write_table(TABLE.slice(0, 2), tmp_path / "part-0.snappy.parquet", row_group_size=1)
    pq.write_table(TABLE.slice(2), tmp_path / "part-1.snappy.parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "_metadata.parquet").touch()
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "*", "*.parquet", "part-?.snappy.parquet"])
def test_parquet_is_found_by_folder_and_glob_in_order(folder, pattern):
    assert rows(open_source(str(folder / pattern))) == TABLE.to_pylist()


def test_a_path_object_and_a_list_of_paths_are_read(folder):
    assert rows(open_source(folder)) == TABLE.to_pylist()
    parts = [folder / "part-1.snappy.parquet", str(folder / "part-0.snappy.parquet")]
    assert [row["a"] for row in rows(open_source(parts))] == [3, 1, 2]


def test_arrow_files_are_read_plain_and_compressed(tmp_path):
    for name, codec in [("a.arrow", None), ("b.arrow", "zstd"), ("c.arrow", "lz4")]:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_file(tmp_path / name, TABLE.schema, options=options) as writer:
            writer.write_table(TABLE)
    pa.feather.write_feather(TABLE, tmp_path / "d.feather")
    assert rows(open_source(str(tmp_path))) == TABLE.to_pylist() * 4


def test_files_on_other_file_systems_are_read():
    memory = fsspec.filesystem("memory")
    with memory.open("/sources/a.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    with memory.open("/sources/b.arrow", "wb") as file, pa.ipc.new_file(file, TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert rows(open_source("memory://sources/*.parquet")) == TABLE.to_pylist()
    assert rows(open_source("memory://sources")) == TABLE.to_pylist() * 2


def test_files_on_two_file_systems_at_once_are_refused(folder):
    with fsspec.filesystem("memory").open("/two/a.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    with pytest.raises(DataError, match=r"'memory://two/a.parquet' is on another file system"):
        open_source([folder / "part-0.snappy.parquet", "memory://two/a.parquet"])


def test_tensor_and_list_columns_survive_parquet(tmp_path):
    source = open_source({"x": np.arange(12, dtype=np.uint8).reshape(3, 2, 2), "y": [[1.0], [2.0, 3.0], []]})
    pq.write_table(source.table, tmp_path / "a.parquet")
    again = open_source(str(tmp_path / "a.parquet"))
    assert again.schema.field("x").type == pa.fixed_shape_tensor(pa.uint8(), (2, 2))
    assert rows(again) == rows(source)


def test_parquet_is_streamed_in_batches_smaller_than_the_file(tmp_path):
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(2_000_000)}), tmp_path / "a.parquet")
    sizes = [batch.num_rows for batch in open_source(str(tmp_path / "a.parquet")).batches()]
    assert sum(sizes) == 2_000_000
    assert max(sizes) <= 65536


def test_selected_columns_are_the_only_ones_read(folder):
    for source in (open_source(folder), open_source(TABLE)):
        chosen = select(source, ["b", "b"])
        assert rows(chosen) == TABLE.select(["b"]).to_pylist()
        with pytest.raises(DataError, match="column 'c' is not in the data"):
            select(source, ["c"])


def test_a_file_with_other_columns_is_named(folder):
    pq.write_table(pa.table({"a": [1.5], "b": ["x"]}), folder / "part-9.parquet")
    with pytest.raises(DataError, match=r"part-9.parquet' lacks 'a' \(int64\) and has 'a' \(double\)"):
        open_source(folder)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"bad.parquet' cannot be read"):
        open_source(str(tmp_path))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"a.csv' is not of a known kind"):
        open_source(str(tmp_path / "a.csv"))


def test_a_folder_partitioned_by_column_is_refused_rather_than_read_without_the_column(tmp_path):
    (tmp_path / "label=1").mkdir()
    pq.write_table(TABLE, tmp_path / "label=1" / "a.parquet")
    with pytest.raises(DataError, match="partitioned folder"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("pattern", ["nothing/here", "*.parquet", "here.parquet", "", "memory://nothing"])
def test_a_path_that_matches_nothing_is_shown(tmp_path, pattern):
    path = pattern if "://" in pattern else str(tmp_path / pattern)
    with pytest.raises(DataError, match="no file matches"):
        open_source(path)


def test_a_file_system_that_is_not_known_is_shown():
    with pytest.raises(DataError, match="'nosuchfs://a' cannot be opened"):
        open_source("nosuchfs://a")


@pytest.mark.processes
def test_importing_the_package_does_not_import_pandas():
    code = "import sys, thinwire.data; sys.exit('pandas' in sys.modules or 'pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
