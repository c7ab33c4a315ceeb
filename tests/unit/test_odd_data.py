"""Data and arguments that are easily wrong: refused with what was found, or warned of, before a worker starts."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.data.weights import Weights
from thinwire.errors import ConfigError, DataError, ThinwireError

RANDOM = np.random.default_rng(0)
ROWS = 60
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = RANDOM.integers(0, 3, ROWS)
DATA = {"x": X, "label": Y}
ONES = np.ones(ROWS, "f4")


def run(data: Any, log: list[events.Event], outputs: int = 3, **arguments: Any) -> tw.Result:
    given: dict[str, Any] = {"cluster": tw.Simulated(workers=2, step_s=0.01), "progress": False}
    return tw.fit(lambda: nn.Linear(4, outputs), data, callbacks=[log.append], **(given | arguments))


def refused(data: Any, told: str, kind: type[ThinwireError] = DataError, **arguments: Any) -> None:
    log: list[events.Event] = []
    with pytest.raises(kind, match=f"(?s){told}"):
        run(data, log, **arguments)
    assert not log, "refused before anything runs"


def after(row: int, value: float) -> Any:
    """Ones, with another value in one row."""
    return np.where(np.arange(ROWS) == row, value, ONES).astype("f4")


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none_is_told_with_its_row(value: float) -> None:
    refused(DATA | {"w": after(50, value)}, rf"column 'w' has 1 value that is no weight.*{value} in row 50", weight="w")


def test_a_weight_of_validation_rows_is_looked_at_too() -> None:
    data, held = DATA | {"w": ONES}, DATA | {"w": after(3, -2.0)}
    refused(data, "column 'w' of the validation data has 1 value", weight="w", validation=held)


def test_weights_that_are_all_zero_are_refused() -> None:
    refused(DATA | {"w": 0 * ONES}, "column 'w' is 0 in all of 60 rows, so that no row counts", weight="w")


def test_a_worker_s_own_rows_may_all_weigh_nothing() -> None:
    weights = Weights("w")
    weights.look_at(pa.record_batch({"w": [0.0, 0.0]}))
    weights.refuse(all_rows=False)


def test_the_labels_are_no_weights() -> None:
    refused(DATA, "weight = 'label' is the column of labels too", ConfigError, weight="label")


@pytest.mark.parametrize("loss", ["mse", "l1", nn.MSELoss(), "bce_with_logits"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_label_that_is_not_finite_is_told_with_its_row(loss: Any, value: float) -> None:
    refused({"x": X, "label": after(7, value)[:, None]}, rf"column 'label' has 1 value that is not.*{value} in row 7",
            loss=loss, outputs=1)  # fmt: skip


@pytest.mark.parametrize(
    "label",
    [np.ones((ROWS, 3), "f4"), -np.eye(3, dtype="f4")[Y], np.ones((ROWS, 3), int), np.full((ROWS, 3), np.nan)],
    ids=["more than one", "below 0", "several classes", "not a number"],
)
@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss()])
def test_labels_that_are_no_probabilities_of_classes_are_refused(label: Any, loss: Any) -> None:
    refused({"x": X, "label": label}, "no probability of a class.*loss='bce_with_logits'", loss=loss)


@pytest.mark.parametrize(
    "label", [np.eye(3, dtype="f4")[Y], np.eye(3, dtype=int)[Y], (np.eye(3)[Y] * 0.7 + 0.1).astype("f2")]
)
def test_probabilities_of_classes_are_taken(label: Any) -> None:
    assert run({"x": X, "label": label}, []).summary["rows"] == ROWS


def test_two_columns_of_one_name_are_refused() -> None:
    told = "column 'a' is in the data 2 times.*Rename or drop"
    refused(pd.DataFrame(np.c_[X[:, :2], Y], columns=["a", "a", "label"]), told)
    refused(pa.Table.from_arrays([pa.array(Y)] * 3, names=["a", "a", "label"]), told)


def test_an_array_with_masked_values_is_refused() -> None:
    refused(DATA | {"x": np.ma.masked_array(X, mask=X > 2)}, r"array 'x' is masked, with \d+ values.*filled")


def test_an_array_that_could_be_masked_and_is_not_is_taken() -> None:
    assert run(DATA | {"x": np.ma.masked_array(X)}, []).summary["rows"] == ROWS


def test_columns_of_float16_are_refused_with_the_cast() -> None:
    refused(DATA | {"x": X.astype("f2")}, r"Give columns of float32: x\.astype")


def test_fewer_rows_than_the_workers_of_groups_are_refused() -> None:
    refused(
        {"x": X[:3], "label": Y[:3]},
        r"there are 3 rows to train on and 4 workers.*tw\.Local\(workers=2\)",
        cluster=tw.Simulated(workers=4, step_s=0.01),
        placement=tw.Planned(group_size=2),
        strategy="synchronous",
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"optimizer": {"name": "adam", "betas": [0.9]}}, "'adam' does not take"),
        ({"optimizer": {"name": "sgd", "lr": float("nan")}}, "a learning rate that is not finite"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=float("inf"))}, "a learning rate that is not finite"),
        ({"scheduler": {"name": "step", "step_size": 0}}, "step_size = 0 is not possible"),
        ({"scheduler": {"name": "cosine", "T_max": -1}}, "T_max = -1 is not possible"),
        ({"scheduler": {"name": "onecycle", "max_lr": 1.0, "total_steps": 1}, "epochs": 2}, "less than the 2 epochs"),
        ({"device": "mps"}, "device = 'mps' is not possible"),
        ({"device": "meta"}, "device = 'meta' is not possible"),
    ],
)
def test_settings_that_no_worker_could_train_with_are_refused(arguments: dict[str, Any], told: str) -> None:
    refused(DATA, told, ConfigError, **arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model is a module of torch\.jit.*give the module that it was made of"):
        tw.fit(torch.jit.script(nn.Linear(4, 3)), DATA, cluster=tw.Simulated(workers=1))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"metrics": ["f1"]}, "metrics has no effect"),
        ({"evaluate_every": 2}, "evaluate_every has no effect"),
        ({"restore_best": True}, "restore_best has no effect"),
        ({"checkpoint_every": 2}, "checkpoint_every has no effect"),
        ({"until": "val_loss >= 0.1", "validation": 0.2}, "val_loss falls as a model learns; write <="),
        ({"until": "val_accuracy <= 0.9", "validation": 0.2}, "val_accuracy rises as a model learns; write >="),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau has no effect"),
    ],
)
def test_what_does_nothing_in_a_run_is_warned_of(
    arguments: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        run(DATA, [], **arguments)
    assert told in caplog.text


def test_a_run_that_is_evaluated_and_saved_warns_of_nothing(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        run(DATA, [], metrics=["f1"], validation=0.2, evaluate_every=5, out=tmp_path, checkpoint_every=5)
    assert "no effect" not in caplog.text
