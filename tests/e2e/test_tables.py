"""A table of categories, numbers and nulls, from its columns to predictions, with networks of the zoo by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli.main import main
from thinwire.errors import ConfigError, DataError

ROWS = 1200
RANDOM = np.random.default_rng(0)
CARRIER = RANDOM.choice(["UA", "B6", "AA", "DL"], ROWS)
HOUR = RANDOM.integers(5, 22, ROWS)
DISTANCE = RANDOM.normal(800, 300, ROWS)
LATE = ((np.isin(CARRIER, ["B6", "AA"]) & (HOUR > 12)) | (DISTANCE > 1200)).astype(np.int64)
FRAME = pd.DataFrame(
    {
        "carrier": np.where(RANDOM.random(ROWS) < 0.05, None, CARRIER),
        "hour": HOUR,
        "distance": np.where(RANDOM.random(ROWS) < 0.1, np.nan, DISTANCE),
        "late": LATE,
        "comment": "not read",
    }
)
ENCODER = tw.TableEncoder(categorical=["carrier", "hour"], numeric=["distance"], flag_nulls=True)
MODELS: dict[str, Any] = {
    "deepfm": "deepfm",
    "dlrm": "dlrm",
    "residual_mlp": {"name": "residual_mlp", "hidden": 32, "blocks": 2},
    "two_tower": {"name": "two_tower", "query": ["carrier", "distance"], "outputs": 8},
}


def fitted(model: Any, **more: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "transform": ENCODER,
        "label": "late",
        "loss": "bce_with_logits",
        "optimizer": {"name": "adam", "lr": 0.02},
        "strategy": tw.Synchronous(),
        "epochs": 8,
        "batch_size": 32,
        "validation": 0.25,
        "cluster": tw.Simulated(workers=2, step_s=0.01),
        "progress": False,
    }
    return tw.fit(model, FRAME, **(settings | more))


@pytest.mark.parametrize("name", MODELS)
def test_a_network_of_the_zoo_learns_a_table_by_its_name(name: str) -> None:
    result = fitted(MODELS[name])
    assert result.summary["val_accuracy"] > 0.85, "the majority is 0.7"
    assert result.transform is not None
    rows = {
        "carrier": np.array(["B6", "ZZ"], object),
        "hour": np.array([20, 20]),
        "distance": np.array([900.0, np.nan]),
    }
    encoded = result.transform(rows)
    with torch.no_grad():
        output = result.model(*(encoded[name] for name in ENCODER.columns))
    assert output.shape == (2, 1)
    assert output[0] > 0, "late, as all flights of B6 after noon"


def test_a_network_of_ones_own_takes_the_columns_by_their_places() -> None:
    encoder = ENCODER.fit(FRAME)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.carrier = nn.Embedding(encoder.shape["sizes"]["carrier"], 4)
            self.rest = nn.Linear(7, 1)

        def forward(self, carrier: Any, hour: Any, distance: Any) -> Any:
            assert carrier.dtype == hour.dtype == torch.int64
            return self.rest(torch.cat([self.carrier(carrier), hour[:, None].float() / 20, distance], 1))

    assert fitted(Own, transform=encoder).summary["val_accuracy"] > 0.7


def test_an_encoder_given_as_a_recipe_writes_it_is_the_same() -> None:
    form = {"categorical": ["carrier", "hour"], "numeric": ["distance"], "flag_nulls": True}
    one, other = (fitted("deepfm", transform=each, epochs=1).model.state_dict() for each in (form, ENCODER))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"transform": None, "inputs": ["hour"]}, "'deepfm' needs to know the columns.*transform is not given"),
        ({"transform": lambda c: c, "inputs": ["hour"]}, "transform is no TableEncoder"),
        ({"label": "hour"}, "label = 'hour' is a column of the TableEncoder"),
        ({"weight": "distance"}, "weight = 'distance' is a column of the TableEncoder"),
        ({"inputs": ["hour", "distance"]}, "has column 'carrier', which is not among inputs"),
        ({"inputs": ["carrier", "hour", "distance", "comment"]}, "input 'comment' is none of them"),
        ({"transform": tw.TableEncoder(numeric=["carrier"])}, "'carrier' holds .* has it as numeric"),
        (
            {"transform": {"categoric": ["carrier"]}},
            "transform.categoric is not a setting of TableEncoder.*categorical",
        ),
        ({"transform": tw.TableEncoder}, "transform = the class TableEncoder is not possible"),
        ({"transform": tw.TableEncoder(numeric=["distance"])}, None),
    ],
    ids=["no encoder", "another", "label", "weight", "an input less", "an input more", "text", "typo", "class", "fine"],
)
def test_a_table_that_does_not_fit_is_refused_before_a_worker_starts(more: dict[str, Any], message: str | None) -> None:
    log: list[Any] = []
    if message is None:
        fitted("residual_mlp", epochs=1, **more)
        return
    with pytest.raises((ConfigError, DataError), match=message):
        fitted("deepfm", callbacks=[log.append], **more)
    assert not log


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "deepfm", "widht": 8}, "model.widht is not a setting of deepfm.*width"),
        ({"name": "deepfm", "width": 0}, "width = 0 is too small"),
        ({"name": "two_tower"}, r"two_tower.query = \[\] leaves one tower without columns"),
        ({"name": "two_tower", "query": ["user"]}, "query has 'user', which is no column"),
        ({"name": "deepfn"}, "'deepfn' is not known.*deepfm"),
        ({"width": 8}, "has no name"),
    ],
    ids=str,
)
def test_settings_of_a_network_that_are_not_possible_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(model)


def test_a_null_label_is_refused_with_an_encoder_which_does_not_fill_it() -> None:
    frame = FRAME.assign(late=FRAME["late"].astype("float").where(FRAME.index > 3))
    with pytest.raises(DataError, match="column 'late' has 4 nulls"):
        tw.fit("deepfm", frame, transform=ENCODER, label="late", cluster=tw.Simulated(workers=2, step_s=0.01))


RECIPE = """
[model]
zoo = "deepfm"
settings = { width = 4, hidden = [16] }

[data]
source = "flights.parquet"
label = "late"
validation = 0.25
table = { categorical = ["carrier", "hour"], numeric = ["distance"], min_count = 2 }

[train]
loss = "bce_with_logits"
epochs = 1

[cluster]
kind = "simulated"
step_s = 0.01
"""


def test_a_recipe_trains_a_table(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    FRAME.to_parquet("flights.parquet")
    Path("flights.toml").write_text(RECIPE)
    assert main(["train", "flights.toml", "--out", "run"]) == 0
    assert "100%" in capsys.readouterr().out
    encoder = tw.TableEncoder(categorical=["carrier", "hour"], numeric=["distance"], min_count=2).fit(FRAME)
    assert tw.TableEncoder.of_state(json.loads(Path("run/encoder.json").read_text())) == encoder
    assert main(["train", "flights.toml", "--set", "data.transform=json:loads"]) != 0
    assert "data.table and data.transform exclude each other" in capsys.readouterr().err
    assert main(["train", "flights.toml", "--set", "data.table.categorcal=[]"]) != 0
    assert "data.table.categorcal is not a setting of TableEncoder" in capsys.readouterr().err
