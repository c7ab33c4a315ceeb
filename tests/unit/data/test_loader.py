import gc
import threading
import traceback
import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data import Batch, Loader, Position, Sampler, Shard, open_source, split, write_shard
from thinwire.errors import ConfigError, DataError


def loader_of(tmp_path, columns, *, batch_size=2, shuffle=False, **options) -> Loader:
    source = open_source(columns if isinstance(columns, pa.Table) else pa.table(columns))
    path = str(tmp_path / "shard.arrow")
    write_shard(path, source.batches(), source.schema)
    shard = Shard.open(path)
    return Loader(shard, Sampler(shard.num_rows, batch_size, 0, 0, shuffle), **options)


def first(loader: Loader) -> Batch:
    batches = loader.batches(Position(), 1)
    try:
        return next(iter(batches))
    finally:
        batches.close()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-prefetch"]


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    workers=st.integers(1, 5),
    batch_size=st.integers(1, 20),
    prefetch=st.integers(0, 3),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_over_all_workers_every_row_is_met_once_an_epoch_also_after_a_resume(
    tmp_path_factory, num_rows, workers, batch_size, prefetch, shuffle, data
):
    directory = str(tmp_path_factory.mktemp("shards"))
    files = split(open_source({"id": np.arange(num_rows)}), workers=workers, directory=directory, seed=1)
    met = {0: [], 1: []}
    for worker, file in enumerate(files):
        shard = Shard.open(file.train)

        def loader(shard=shard, worker=worker):
            sampler = Sampler(shard.num_rows, batch_size, 5, worker, shuffle)
            return Loader(shard, sampler, inputs=["id"], label=None, prefetch=prefetch)

        whole = list(loader().batches(Position(), 2))
        for batch in whole:
            met[batch.position.epoch] += batch.inputs[0].tolist()
            assert batch.num_rows == len(batch.inputs[0])
        if whole:
            cut = data.draw(st.integers(0, len(whole) - 1))
            again = list(loader().batches(whole[cut].position, 2))
            assert [b.position for b in again] == [b.position for b in whole[cut:]]
            assert [b.inputs[0].tolist() for b in again] == [b.inputs[0].tolist() for b in whole[cut:]]
    assert sorted(met[0]) == sorted(met[1]) == list(range(num_rows))


@pytest.mark.parametrize(
    ("given", "as_input", "as_label", "as_weight"),
    [
        ("float64", "float32", "float32", "float32"),
        ("float32", "float32", "float32", "float32"),
        ("float16", "float16", "float16", "float16"),
        ("int64", "int64", "int64", "float32"),
        ("int32", "int32", "int64", "float32"),
        ("int16", "int16", "int64", "float32"),
        ("uint8", "uint8", "int64", "float32"),
        ("bool", "bool", "bool", "float32"),
    ],
)
@pytest.mark.parametrize("transform", [None, dict], ids=["plain", "transformed"])
def test_dtypes_follow_the_role_of_the_column(tmp_path, given, as_input, as_label, as_weight, transform):
    loader = loader_of(
        tmp_path,
        {"x": np.array([0, 1], given)},
        inputs=["x"],
        label="x",
        weight="x",
        transform=transform,
        prefetch=0,
    )
    batch = first(loader)
    assert batch.inputs[0].dtype == getattr(torch, as_input)
    assert batch.label.dtype == getattr(torch, as_label)
    assert batch.weight.dtype == getattr(torch, as_weight)


def test_inputs_come_in_the_order_they_are_named_and_absent_roles_are_none(tmp_path):
    loader = loader_of(tmp_path, {"a": [1, 2], "b": [3, 4], "c": ["x", "y"]}, inputs=["b", "a"], label=None)
    batch = first(loader)
    assert [tensor.tolist() for tensor in batch.inputs] == [[3, 4], [1, 2]]
    assert batch.label is None
    assert batch.weight is None
    assert batch.position == Position(0, 0)


def test_strings_become_tensors_through_a_transform_that_sees_all_columns(tmp_path):
    def lengths(columns):
        return {"length": np.array([len(text) for text in columns["text"]]), "y": columns["y"]}

    loader = loader_of(tmp_path, {"text": ["a", "bcd"], "y": [0, 1]}, inputs=["length"], label="y", transform=lengths)
    assert first(loader).inputs[0].tolist() == [1, 3]


def test_ragged_lists_become_tensors_through_a_transform(tmp_path):
    def pad(columns):
        return {"x": torch.tensor([np.pad(row, (0, 3 - len(row))).tolist() for row in columns["x"]])}

    loader = loader_of(tmp_path, {"x": [[1], [2, 3, 4]]}, inputs=["x"], label=None, transform=pad)
    assert first(loader).inputs[0].tolist() == [[1, 0, 0], [2, 3, 4]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", "b"], "column 'x' holds string, not numbers; .* Give a transform"),
        ([[1], [2, 3]], "column 'x' has lists .* row 0 has 1 values, row 1 has 2; .* Give a transform"),
    ],
)
def test_what_is_no_tensor_needs_a_transform(tmp_path, column, message):
    with pytest.raises(DataError, match=message):
        loader_of(tmp_path, {"x": column}, inputs=["x"], label=None)


def test_a_missing_column_is_named_with_the_nearest(tmp_path):
    with pytest.raises(DataError, match=r"'lable' is not in the data. Did you mean 'label'"):
        loader_of(tmp_path, {"x": [1], "label": [1]}, inputs=["x"], label="lable")


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda c: {"x": c["x"], "lable": c["x"]}, "'label' is missing after .* Did you mean 'lable'.* x"),
        (lambda c: None, "the transform returned NoneType; it must return a dict"),
        (lambda c: {**c, "label": c["x"][:1]}, "'label' has 1 rows after the transform where .* has 2"),
        (lambda c: {**c, "label": torch.tensor(0)}, "'label' has 0 rows after"),
        (lambda c: {**c, "label": np.array(["a", "b"])}, "'label' is a numpy array of <U1 after"),
        (lambda c: {**c, "label": [object(), "b"]}, "'label' is list after"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_transform_must_not_return_is_refused(tmp_path, transform, message, prefetch):
    loader = loader_of(
        tmp_path,
        {"x": [1, 2], "label": [1, 2]},
        inputs=["x"],
        label="label",
        transform=transform,
        prefetch=prefetch,
    )
    with pytest.raises(DataError, match=message):
        first(loader)


def test_a_transform_may_return_read_only_reversed_or_swapped_arrays(tmp_path):
    def odd(columns):
        array = columns["x"].numpy()
        frozen = array.copy()
        frozen.flags.writeable = False
        return {"a": frozen, "b": array[::-1], "c": array.astype(">i4"), "d": array.tolist()}

    loader = loader_of(tmp_path, {"x": [1, 2]}, inputs=list("abcd"), label=None, transform=odd)
    assert [tensor.tolist() for tensor in first(loader).inputs] == [[1, 2], [2, 1], [1, 2], [1, 2]]


def test_a_thread_is_used_only_where_it_pays_unless_asked_for(tmp_path):
    columns = {"x": [1.0] * 8}
    for options, threads in [({}, 0), ({"transform": dict}, 1), ({"prefetch": 1}, 1)]:
        batches = loader_of(tmp_path, columns, inputs=["x"], label=None, **options).batches(Position(), None)
        next(batches)
        assert len(prefetch_threads()) == threads
        batches.close()
        assert prefetch_threads() == []


def test_tensors_are_put_on_the_device_by_a_thread(tmp_path):
    loader = loader_of(tmp_path, {"x": [1.0] * 8}, inputs=["x"], label="x", device="meta")
    batches = loader.batches(Position(), 1)
    batch = next(batches)
    assert (batch.inputs[0].device.type, batch.label.device.type) == ("meta", "meta")
    assert len(prefetch_threads()) == 1
    batches.close()


def test_an_error_in_the_thread_reaches_the_consumer_with_its_traceback_after_the_good_batches(tmp_path):
    def fail_at_row_four(columns):
        if 4 in columns["x"].tolist():
            raise KeyError("user code")
        return columns

    loader = loader_of(
        tmp_path, {"x": list(range(8))}, inputs=["x"], label=None, transform=fail_at_row_four, prefetch=3
    )
    seen = []
    with pytest.raises(KeyError, match="user code") as caught:
        seen.extend(batch.inputs[0].tolist() for batch in loader.batches(Position(), 1))
    assert seen == [[0, 1], [2, 3]]
    assert "fail_at_row_four" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert prefetch_threads() == []


def test_no_more_batches_are_gathered_ahead_than_asked_for(tmp_path):
    gathered, third = [], threading.Event()

    def note(columns):
        gathered.append(columns["x"].tolist())
        if len(gathered) == 3:
            third.set()
        return columns

    loader = loader_of(tmp_path, {"x": list(range(20))}, inputs=["x"], label=None, transform=note, prefetch=2)
    batches = loader.batches(Position(), 1)
    next(batches)
    assert third.wait(30)  # one handed over, two ahead
    loader.close()
    assert len(gathered) == 3
    assert list(batches) == []


def test_close_ends_threads_and_iterations_and_may_be_repeated(tmp_path):
    loader = loader_of(tmp_path, {"x": list(range(20))}, inputs=["x"], label=None, prefetch=2)
    iterations = [loader.batches(Position(), None) for _ in range(2)]
    for batches in iterations:
        next(batches)
    assert len(prefetch_threads()) == 2
    loader.close()
    loader.close()
    assert prefetch_threads() == []
    assert [list(batches) for batches in iterations] == [[], []]
    assert list(loader.batches(Position(), 1)) == []


def test_a_forgotten_iteration_leaves_no_thread_and_no_loader(tmp_path):
    loader = loader_of(tmp_path, {"x": list(range(20))}, inputs=["x"], label=None, prefetch=2)
    gone = weakref.ref(loader)
    batches = loader.batches(Position(), None)
    next(batches)
    del batches, loader
    gc.collect()
    assert prefetch_threads() == []
    assert gone() is None


def test_an_empty_shard_gives_no_batches_even_when_asked_forever(tmp_path):
    table = pa.table({"x": pa.array([], pa.float32())})
    for prefetch in (0, 2):
        loader = loader_of(tmp_path, table, inputs=["x"], label=None, prefetch=prefetch)
        assert list(loader.batches(Position(), None)) == []


def test_a_start_past_the_last_epoch_gives_nothing(tmp_path):
    loader = loader_of(tmp_path, {"x": [1, 2]}, inputs=["x"], label=None)
    assert list(loader.batches(Position(3, 0), 3)) == []


def test_impossible_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="inputs is 'x'; it must be a list"):
        loader_of(tmp_path, {"x": [1]}, inputs="x", label=None)
    with pytest.raises(ConfigError, match="prefetch is -1"):
        loader_of(tmp_path, {"x": [1]}, inputs=["x"], label=None, prefetch=-1)
    shard = loader_of(tmp_path, {"x": [1]}, inputs=["x"], label=None)._shard
    with pytest.raises(ConfigError, match="the sampler is for 5 rows and the shard has 1"):
        Loader(shard, Sampler(5, 1, 0, 0), inputs=["x"], label=None)
