"""Rows that hold nothing to learn from are refused, or warned of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

import thinwire as tw
from thinwire.coordinator.rows import Rows
from thinwire.errors import DataError
from thinwire.protocol.messages import Join

RANDOM = np.random.default_rng(0)


def rows(count: int, label: Any = None) -> dict[str, Any]:
    values = RANDOM.normal(size=(count, 4)).astype(np.float32)
    return {"x": values, "label": np.arange(count) % 3 if label is None else np.full(count, label)}


def fit(data: Any, **arguments: Any) -> tw.Result:
    return tw.fit(lambda: nn.Linear(4, 3), data, cluster=tw.Simulated(workers=2, step_s=0.01), **arguments)


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="the data has 0 rows"):
        fit(rows(0))
    with pytest.raises(DataError, match="the data has 0 rows"):
        fit(pd.DataFrame({"a": np.array([], np.float32), "label": np.array([], np.int64)}))


def test_no_rows_after_those_for_validation_are_refused() -> None:
    with pytest.raises(DataError, match="leaves none to train on"):
        fit(rows(2), validation=0.9)


def test_a_share_that_holds_back_no_row_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="validation = 0.01 of so few rows holds back none"):
        result = fit(rows(12), validation=0.01)
    assert result.history == []


@pytest.mark.parametrize("waiting", [{"until": "val_loss <= 0.1"}, {"stop": tw.EarlyStopping()}], ids=["until", "stop"])
def test_waiting_for_an_evaluation_of_no_rows_is_refused(waiting: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="looks at validation rows"):
        fit(rows(12), validation=0.01, **waiting)
    with pytest.raises(DataError, match=r"the validation data has no rows, and .* looks at validation rows"):
        fit(rows(12), validation=rows(0), **waiting)


@pytest.mark.parametrize(("label", "loss"), [(2, "cross_entropy"), (0.5, "mse")])
def test_labels_that_are_all_the_same_are_warned_of(label: float, loss: str) -> None:
    model = nn.Linear(4, 3 if loss == "cross_entropy" else 1)
    with pytest.warns(
        UserWarning, match=f"column 'label' is {label} in all of 12 rows: there is nothing to tell apart"
    ):
        tw.fit(model, rows(12, label), loss=loss, cluster=tw.Simulated(workers=2, step_s=0.01))


def test_labels_that_differ_are_not_warned_of() -> None:
    fit(rows(12))


def joined(**rows: Any) -> Join:
    return Join(attempt=0, address="memory:0.0", **rows)


def test_workers_that_read_their_own_rows_say_whether_there_is_anything_to_learn() -> None:
    apart = Rows(2)
    apart.heard(0, joined(rows=5, same="1"), {0: 5})
    apart.heard(1, joined(rows=5, same="0"), {0: 5, 1: 5})  # each has one class, together there are two

    alike = Rows(3)
    alike.heard(0, joined(rows=5, same="1"), {0: 5})
    alike.heard(2, joined(rows=0), {0: 5, 2: 0})  # it has no rows
    with pytest.warns(UserWarning, match="column 'label' is 1 in all of 9 rows"):
        alike.heard(1, joined(rows=5, same="1"), {0: 5, 1: 4, 2: 0})
    alike.heard(1, joined(rows=5, same="1"), {0: 5, 1: 4, 2: 0})  # its successor: said once

    failing = Rows(2)
    failing.heard(0, joined(), {0: 0})
    failing.heard(1, joined(), {0: 0, 1: 0})  # both are about to say why

    empty = Rows(2)
    empty.heard(0, joined(rows=0), {0: 0})
    with pytest.raises(DataError, match="no worker has rows to train on"):
        empty.heard(1, joined(rows=0), {0: 0, 1: 0})
