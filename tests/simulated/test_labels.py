"""Labels of every type and kind of data, through whole runs in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.data import Shard
from thinwire.data.feeds import Streamed, Wanted
from thinwire.errors import DataError, ThinwireError
from thinwire.replicas.labels import labels_of

ROWS, CLASSES = 48, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = RANDOM.integers(0, CLASSES, ROWS)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def fit(data: Any, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "model": net,
        "strategy": tw.SparkNet(period=2),
        "cluster": tw.Simulated(workers=2, step_s=0.01),
        "batch_size": 8,
        "validation": 0.25,
        "progress": False,
    }
    settings |= changes
    return tw.fit(settings.pop("model"), data, **settings)


def same(one: tw.Result, other: tw.Result) -> bool:
    states = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def dealt(x: Any, y: Any) -> pa.Table:
    return pa.table({"features": pa.array(list(x), pa.list_(pa.float32())), "label": y})


KINDS: dict[str, Callable[[Path], Any]] = {
    "pair": lambda folder: (X, Y.astype("f8")),
    "lists": lambda folder: {"features": X, "label": Y.astype("f8").tolist()},
    "tensors": lambda folder: torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y).double()),
    "halves": lambda folder: (X, Y.astype("f2")),
    "bytes": lambda folder: (X, Y.astype("u1")),
    "pandas": lambda folder: pd.DataFrame({"features": list(X), "label": Y.astype("f8")}),
    "arrow": lambda folder: dealt(X, pa.array(Y.astype("f8"))),
    "batches": lambda folder: dealt(X, pa.array(Y.astype("f8"))).to_batches(max_chunksize=7),
    "decimals": lambda folder: dealt(X, pa.array([Decimal(int(y)) for y in Y], pa.decimal128(10, 2))),
    "dictionary": lambda folder: dealt(X, pa.array(Y.astype("f8")).dictionary_encode()),
    "parquet": lambda folder: written(folder, dealt(X, pa.array(Y.astype("f8")))),
}


def written(folder: Path, table: pa.Table) -> str:
    pq.write_table(table, folder / "rows.parquet")
    return str(folder / "rows.parquet")


@functools.cache
def of_integers() -> tw.Result:
    return fit((X, Y))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_of_any_type_are_classes_in_every_kind_of_data(kind: str, tmp_path: Path) -> None:
    found = fit(KINDS[kind](tmp_path))
    assert same(found, of_integers())
    assert found.summary["val_accuracy"] == of_integers().summary["val_accuracy"]


LOSSES: dict[str, Any] = {
    "by name": "nll",
    "module": nn.CrossEntropyLoss(),
    "of margins": nn.MultiMarginLoss(),
    "function": F.cross_entropy,
    "partial": functools.partial(F.nll_loss, reduction="none"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # multi_margin_loss under vmap, in virtual time
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_doubles_train_every_loss_over_classes_as_integers_do(loss: Any) -> None:
    found = fit((X, Y.astype("f8")), loss=loss)
    assert same(found, fit((X, Y), loss=loss))
    assert "val_accuracy" in found.summary


@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "f8"])
@pytest.mark.parametrize("loss", ["bce_with_logits", nn.BCEWithLogitsLoss()], ids=str)
def test_labels_of_any_type_are_numbers_for_a_loss_of_two_classes(loss: Any, dtype: str) -> None:
    given = (Y > 0).astype(dtype)
    expected = fit((X, given.astype("f4")), model=single, loss=loss)
    assert same(fit((X, given), model=single, loss=loss), expected)
    assert expected.summary["val_accuracy"] > 0.0


@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(), nn.SmoothL1Loss()], ids=str)
def test_numbers_stay_numbers(loss: Any) -> None:
    halves = fit((X, Y + 0.5), model=single, loss=loss)
    assert not same(halves, fit((X, Y), model=single, loss=loss))


def test_a_probability_for_each_class_stays_one() -> None:
    given = np.eye(CLASSES)[Y]
    hard = fit((X, given), loss="cross_entropy")
    assert hard.summary["train_loss"] == pytest.approx(of_integers().summary["train_loss"], rel=1e-5)
    assert hard.summary["val_accuracy"] == of_integers().summary["val_accuracy"]
    assert same(fit((X, given.astype(int))), hard)


def test_doubles_for_every_place_of_a_sequence_are_classes() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x.unsqueeze(2)).transpose(1, 2)
            return found

    each = RANDOM.integers(0, CLASSES, (ROWS, 4))
    assert same(fit((X, each.astype("f8")), model=Tagger), fit((X, each), model=Tagger))


def test_rows_with_the_ignored_value_are_left_out_and_not_refused() -> None:
    some = Y.astype("f8")
    some[::4] = -1.0
    fit((X, some), loss=nn.CrossEntropyLoss(ignore_index=-1))
    with pytest.raises(DataError, match=r"12 values that are no class, of 48 rows: -1\.0 in row 0"):
        fit((X, some))


PATHS: dict[str, dict[str, Any]] = {
    "rounds": {},
    "table": {"strategy": tw.ParameterTable(consistency="strict")},
    "peers": {"strategy": tw.EASGD(period=2)},
    "planned": {"placement": tw.Planned(group_size=2), "strategy": tw.Synchronous()},
    "tensors": {"placement": tw.TensorParallel(group_size=2), "strategy": tw.Synchronous()},
    "weights": {"weight": "weight"},
    "closure": {"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.1)},
}


@pytest.mark.parametrize("path", PATHS)
def test_doubles_are_classes_wherever_batches_go(path: str) -> None:
    columns = {"features": X, "weight": np.ones(ROWS, "f4")}
    settings = {"inputs": ["features"]} | PATHS[path]
    doubles = fit({**columns, "label": Y.astype("f8")}, **settings)
    assert same(doubles, fit({**columns, "label": Y}, **settings))


WRONG = {"half": 2.5, "negative": -1.0, "nan": float("nan"), "infinite": float("inf"), "beyond": float(CLASSES)}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", ["arrays", "parquet", "validation"])
def test_what_is_no_class_is_refused_before_training_starts(kind: str, value: float, tmp_path: Path) -> None:
    bad = Y.astype("f8")
    bad[[7, 30]] = value
    data: dict[str, Any] = {"arrays": (X, bad), "validation": (X, Y.astype("f8"))}
    changes: dict[str, Any] = {"validation": (X, bad)} if kind == "validation" else {}
    if kind == "parquet":
        data[kind] = written(tmp_path, dealt(X, pa.array(bad)))
    log: list[events.Event] = []
    told = rf"column 'label'.* has 2 values that are no class, of 48 rows: {value} in row 7\. cross_entropy takes whole"
    with pytest.raises(DataError, match=told):
        fit(data[kind], callbacks=[log.append], **changes)
    assert not [event for event in log if isinstance(event, events.WorkerJoined)]


def test_a_missing_label_is_refused_with_column_and_count() -> None:
    with pytest.raises(DataError, match="column 'label' has 1 null in rows 0 to 47"):
        fit(dealt(X, pa.array([None, *Y[1:].astype("f8")])))


def test_text_for_a_label_is_told_of_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"column 'label' holds string; cross_entropy takes(?s:.)*StringIndexer"):
        fit(dealt(X, pa.array(["cat"] * ROWS)))


def made(columns: dict[str, Any], *, value: float) -> dict[str, Any]:
    label = columns["label"].double()
    label[0] = value
    return columns | {"label": label}


def test_labels_that_a_transform_makes_are_checked() -> None:
    kept = fit((X, Y), transform=functools.partial(made, value=1.0), validation=None)
    assert kept.summary["rows"] == ROWS
    with pytest.raises(ThinwireError, match="column 'label' after the transform has 1 value that is no class"):
        fit((X, Y), transform=functools.partial(made, value=0.5), validation=None)
    with pytest.raises(ThinwireError, match=r"1 value that is no class, of 7 rows: 3.0 in row 0(?s:.)*3 outputs"):
        fit((X, Y), transform=functools.partial(made, value=3.0), validation=None)


def test_a_stream_is_looked_at_while_it_becomes_a_shard() -> None:
    bad = Y.astype("f8")
    bad[[3, 40]] = 9.0, 0.25
    labels = labels_of("cross_entropy").measured((CLASSES,))
    wanted = Wanted(("features", "label"), 0.25, None, 0, label="label", labels=labels)
    for values, told in (
        (Y.astype("f8"), None),
        (bad, r"'label' of worker 1's rows has 2 values .* 9.0 in row 3, 0.25"),
    ):
        table = dealt(X, pa.array(values))
        feed = Streamed(table.schema, wanted)
        if told is None:
            with feed.shard(1, iter(table.to_batches(5)), lambda name: iter(())) as files:
                assert Shard.open(files.train).num_rows == 36
            continue
        with pytest.raises(DataError, match=told), feed.shard(1, iter(table.to_batches(5)), lambda name: iter(())):
            pass


def test_vectors_of_spark_ml_in_a_file_are_read_without_spark(tmp_path: Path) -> None:
    fields = [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32()))]
    kind = pa.struct([*fields, ("values", pa.list_(pa.float64()))])
    rows = [{"type": 1, "size": None, "indices": None, "values": [float(v) for v in row]} for row in X]
    table = pa.table({"features": pa.array(rows, kind), "label": pa.array(Y.astype("f8"))})
    assert same(fit(written(tmp_path, table)), of_integers())


def test_a_net_of_caffe_takes_doubles_for_labels() -> None:
    """Its losses are layers of the net, and a label is one of its inputs."""
    pytest.importorskip("google.protobuf")
    from thinwire.caffe.training import training, whole_loss

    net = str(Path(__file__).parents[2] / "recipes" / "caffe" / "digits_train_val.prototxt")
    settings: dict[str, Any] = {"inputs": ["data", "label"], "label": None, "loss": whole_loss, "validation": None}
    data = RANDOM.random((ROWS, 1, 8, 8), np.float32)
    found = [fit({"data": data, "label": y}, model=training(net).model, **settings) for y in (Y, Y.astype("f8"))]
    assert same(*found)
