"""Records of an RDD as Arrow batches, without Spark; `tests/spark/test_rdds.py` has them on a cluster."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from thinwire.data.columns import dense
from thinwire.errors import DataError
from thinwire.records import is_rdd, packing_of


def table(records: list[Any], looked_at: int = 32) -> Any:
    packing = packing_of(records[:looked_at])
    return pa.Table.from_batches(packing.opened(packing(records)), packing.schema)


def test_a_pair_has_features_and_a_label() -> None:
    found = table([(np.full((1, 2, 3), i, np.float32), i) for i in range(5)])
    assert found.schema.names == ["features", "label"]
    values = dense(found.column("features").combine_chunks())
    assert values.shape == (5, 1, 2, 3)
    assert values.dtype == np.float32
    assert values[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert found.column("label").to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "array",
    [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), [np.float64(1.0), np.float64(2.0)]],
    ids=["list", "tuple", "numpy", "torch", "numpy_numbers"],
)
def test_lists_arrays_and_tensors_are_one_column(array: Any) -> None:
    found = table([(array, 1.0)] * 3)
    assert found.schema.names == ["features", "label"]
    assert found.column("features").to_pylist() == [[1.0, 2.0]] * 3


def test_several_arrays_are_several_columns_and_a_bare_array_is_one() -> None:
    assert table([([np.zeros(2), np.ones(3)], 1)]).schema.names == ["features_0", "features_1", "label"]
    assert table([np.zeros(2)] * 2).schema.names == ["features"]
    assert table([[0.0, 1.0]] * 2).schema.names == ["features"]


def test_named_records_have_the_columns_that_they_name() -> None:
    Person = namedtuple("Person", "age name label")
    for records in ([{"age": 4, "name": "x", "label": 1}], [Person(4, "x", 1)]):
        assert table(records).to_pylist() == [{"age": 4, "name": "x", "label": 1}]


@pytest.mark.parametrize(
    ("given", "kind"),
    [(np.uint8, pa.int16()), (np.uint16, pa.int32()), (np.float16, pa.float32()), (np.bool_, pa.bool_())],
)
def test_numbers_that_spark_lacks_become_wider_ones(given: Any, kind: Any) -> None:
    largest = (
        np.array([1, 0])
        if given is np.bool_
        else np.array([np.finfo(given).max if given is np.float16 else np.iinfo(given).max, 0])
    )
    found = table([(largest.astype(given), 0)])
    assert found.schema.field("features").type.value_type == kind
    assert found.column("features").to_pylist()[0][0] == largest[0]


def test_whole_numbers_among_the_first_records_do_not_cut_those_after() -> None:
    found = table([([0, 1], 0), ([0.5, 1], 1)])
    assert found.column("features").to_pylist() == [[0.0, 1.0], [0.5, 1.0]]
    with pytest.raises(DataError, match=r"'features' of a record of the RDD is not a list<.*: int64>.*one type"):
        table([([0, 1], 0), ([0.5, 1], 1)], looked_at=1)


def test_arrays_of_different_lengths_and_missing_values_are_left_to_the_worker_who_tells_of_them() -> None:
    assert table([([0.0, 1.0], 0), ([0.5], None)]).to_pylist()[1] == {"features": [0.5], "label": None}


def test_records_are_cut_into_batches_by_their_size() -> None:
    packing = packing_of([(np.zeros(1024, np.float32), 0)])
    sizes = [batch.num_rows for batch in packing.opened(packing([(np.zeros(1024, np.float32), i) for i in range(9)]))]
    assert sum(sizes) == 9
    assert max(sizes) == packing.rows < 9


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "the RDD has no records"),
        ([(1, 2, 3)], r"is a tuple of 3; a pair \(array, label\)"),
        (["text"], "is a str: 'text'"),
        ([object()], "is a object"),
        ([([1.0, "a"], 0)], r"'features' of the RDD's records is not an array of numbers: \"\[1.0, 'a'\]\" \(list\)"),
        ([([1.0], 0), (["a"], 0)], "'features' of the RDD's records is not an array of numbers"),
        ([([1.0], 0), ([[1.0]], 0)], "one number of dimensions"),
        ([([1.0], None)], "'label' is None"),
        ([{"a": 1}, {"b": 1}], "has 'b' where the first has 'a'"),
    ],
)
def test_records_of_no_known_form_are_refused(records: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        packing_of(records)


def test_a_later_record_of_another_form_is_refused() -> None:
    packing = packing_of([{"a": 1}])
    with pytest.raises(DataError, match="has 'b' and no 'a', which the first has"):
        list(packing([{"a": 1}, {"b": 1}]))


def test_only_rdds_are_taken_for_rdds() -> None:
    assert not is_rdd([1, 2])
    assert not is_rdd(type("RDD", (), {})())
