"""Embeddings with sparse gradients train under every strategy, or are refused before a worker starts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError

RANDOM = np.random.default_rng(0)
ROWS = 240
X, Y = RANDOM.integers(0, 40, ROWS), RANDOM.integers(0, 2, ROWS)
o = torch.optim


class Net(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(40, 8, sparse=sparse), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(40, 1, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.reshape(-1, 1))


class Function(nn.Module):
    """Its gradient is sparse, and no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(40, 8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.embedding(x, self.table, sparse=True))


def run(model: Any, strategy: tw.Strategy, optimizer: Any = None, **more: Any) -> tw.Result:
    settings: dict[str, Any] = {
        "loss": "bce_with_logits",
        "optimizer": optimizer or (lambda p: o.SGD(p, lr=0.5)),
        "batch_size": 20,
        "steps": 8,
        "cluster": tw.Simulated(workers=2, step_s=0.01),
        "progress": False,
    }
    return tw.fit(model, {"x": X, "label": Y}, strategy=strategy, **(settings | more))


def same(one: tw.Result, other: tw.Result) -> None:
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(
    "optimizer", [lambda p: o.SGD(p, lr=0.5), lambda p: o.Adagrad(p, lr=0.1)], ids=["SGD", "Adagrad"]
)
@pytest.mark.parametrize("strategy", [tw.Synchronous(), tw.SparkNet(period=2)], ids=["Synchronous", "SparkNet"])
def test_a_sparse_gradient_trains_as_a_dense_one(
    strategy: tw.Strategy, optimizer: Any, clip_norm: float | None
) -> None:
    one, other = (run(lambda s=s: Net(s), strategy, optimizer, clip_norm=clip_norm) for s in (True, False))
    same(one, other)


@pytest.mark.parametrize("model", [Bag, Function])
@pytest.mark.parametrize(
    "strategy",
    [tw.Synchronous(), tw.ParameterTable(), tw.MPCA(), tw.Relay()],
    ids=["Synchronous", "ParameterTable", "MPCA", "Relay"],
)
def test_bags_and_functions_of_sparse_gradients_train_too(model: Any, strategy: tw.Strategy) -> None:
    assert np.isfinite(run(model, strategy).summary["train_loss"])


def test_a_function_of_sparse_gradients_may_be_clipped() -> None:
    assert np.isfinite(run(Function, tw.Relay(), clip_norm=0.1).summary["train_loss"])


def test_a_model_given_whole_stays_as_it_is() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    run(model, tw.Synchronous())
    assert model.table.sparse
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_of_an_optimizer_with_momentum_is_gone_on_from(tmp_path: Any) -> None:
    """Torch's SGD keeps a sparse momentum of sparse gradients, which no checkpoint holds."""
    settings: dict[str, Any] = {"optimizer": lambda p: o.SGD(p, lr=0.1, momentum=0.9)}
    whole = run(Net, tw.SparkNet(period=2), steps=8, **settings)
    run(Net, tw.SparkNet(period=2), steps=4, out=str(tmp_path), checkpoint_every=4, **settings)
    same(run(Net, tw.SparkNet(period=2), steps=8, resume=str(tmp_path), **settings), whole)


@pytest.mark.parametrize(
    ("model", "strategy", "more", "message"),
    [
        (Bag, tw.Synchronous(), {}, "synchronous exchanges dense gradients: use Adam"),
        (Bag, tw.ParameterTable(), {}, "parameter_table exchanges dense gradients"),
        (Bag, tw.MPCA(), {}, "MPCA adds a pull to every gradient"),
        (Bag, tw.Relay(), {"clip_norm": 1.0}, "clip_norm = 1.0 makes them dense: leave"),
        (Net, tw.Relay(), {}, "that of 'last.weight' is dense; use Adam"),
        (Bag, tw.Relay(), {"placement": tw.Planned(group_size=2)}, "SparseAdam|read"),
    ],
    ids=["Synchronous", "ParameterTable", "MPCA", "clip_norm", "a dense layer", "a placement"],
)
def test_sparse_adam_is_refused_where_a_gradient_is_dense(
    model: Any, strategy: tw.Strategy, more: dict[str, Any], message: str
) -> None:
    log: list[Any] = []
    with pytest.raises(ConfigError, match=message):
        run(model, strategy, lambda p: o.SparseAdam(p, lr=0.1), callbacks=[log.append], **more)
    assert not log


def test_sparse_adam_trains_where_all_gradients_are_sparse() -> None:
    assert run(Bag, tw.Relay(), lambda p: o.SparseAdam(p, lr=0.1), steps=40).summary["train_loss"] < 0.69


def test_networks_of_tables_take_sparse_gradients() -> None:
    data = {"user": X, "item": Y, "label": (X + Y) % 2}
    result = tw.fit(
        {"name": "deepfm", "sparse": True, "width": 4},
        data,
        transform=tw.TableEncoder(categorical=["user", "item"]),
        loss="bce_with_logits",
        cluster=tw.Simulated(workers=2, step_s=0.01),
        progress=False,
    )
    assert np.isfinite(result.summary["train_loss"])
