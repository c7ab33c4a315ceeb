"""Networks of which a part is frozen: workers exchange, keep and save the other part alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.checkpoint import CheckpointStore
from thinwire.errors import ConfigError, WorkerError
from thinwire.parameters import FlatParameters
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.frozen import base_digest, load_over_base, without_base

WIDE = 256


class OnABase(nn.Module):
    """A small head on a wide base, which is frozen unless said."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
        self.base.requires_grad_(not frozen)
        self.head = nn.Linear(WIDE, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.base(x.float()))
        return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)


def fit(model: Any = OnABase, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "inputs": ["pixels"], "optimizer": sgd, "steps": 20, "batch_size": 32, "cluster": tw.Simulated(workers=2),
        "strategy": tw.SparkNet(period=5), "progress": False,
    }  # fmt: skip
    return tw.fit(model, "digits", **asked | given)


def bytes_of(module: nn.Module) -> int:
    return FlatParameters(module).size * 4


STRATEGIES = [tw.Synchronous(), tw.SparkNet(period=5), tw.DiLoCo(period=5), tw.Relay(), tw.MPCA(), tw.EASGD(period=5)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_a_frozen_base_costs_no_bytes_on_the_wire(strategy: tw.Strategy) -> None:
    found = fit(strategy=strategy)
    rounds = max(1, found.summary["rounds"])
    whole = bytes_of(OnABase(frozen=False))
    assert found.summary["bytes_sent"] > 0
    assert found.summary["bytes_sent"] < 0.5 * whole * rounds
    torch.manual_seed(0)
    assert torch.equal(found.model.base[1].weight, OnABase().base[1].weight)


def test_what_is_sent_is_that_of_a_network_of_the_trained_part_alone() -> None:
    """A round of two workers sends each half of the trained part once there and once back."""
    found = fit(strategy=tw.SparkNet(period=5))
    payload = found.summary["rounds"] * 2 * bytes_of(OnABase())
    assert payload <= found.summary["bytes_sent"] < payload * 1.5 + 200_000


def test_checkpoints_and_the_model_handed_back_are_without_the_base(tmp_path: Path) -> None:
    fit(out=str(tmp_path), checkpoint_every=10, validation=0.1)
    stored = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
    assert stored < bytes_of(OnABase(frozen=False))
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    manifest, _ = store.newest_whole(lambda manifest: "")
    assert manifest is not None
    joint: Any = store.read_part(manifest, "joint")
    assert set(joint["model"]) == {"head.weight", "head.bias"}


def test_a_run_goes_on_from_a_checkpoint_without_the_base(tmp_path: Path) -> None:
    whole = fit(steps=20)
    fit(steps=10, out=str(tmp_path), checkpoint_every=5)
    resumed = fit(steps=20, resume=str(tmp_path))
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value)


def test_a_base_that_comes_out_different_on_a_worker_ends_the_run_with_what_to_do() -> None:
    numbers = itertools.count()

    def made() -> nn.Module:
        model = OnABase()
        with torch.no_grad():
            model.base[1].bias.fill_(float(next(numbers)))
        return model

    with pytest.raises((ConfigError, WorkerError), match="other frozen parameters"):
        fit(made)


def test_a_network_that_is_given_whole_keeps_its_own_base() -> None:
    model = OnABase()
    before = model.base[1].weight.detach().clone()
    found = fit(model)
    assert torch.equal(found.model.base[1].weight, before)


def test_names_of_tied_parameters_all_get_the_joint_model_s_values() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    replica = TorchReplica(module, TrainSpec(loss="mse", optimizer=sgd))
    joint = torch.arange(16, dtype=torch.float32)
    state = replica.state_of(joint, {})
    assert torch.equal(state["0.weight"], joint.view(4, 4))
    assert torch.equal(state["1.weight"], joint.view(4, 4))


def test_a_digest_tells_bases_apart_by_value_type_and_shape() -> None:
    torch.manual_seed(0)
    one = OnABase()
    torch.manual_seed(0)
    other = OnABase()
    assert base_digest(one) == base_digest(other) != ""
    assert base_digest(OnABase(frozen=False)) == ""
    with torch.no_grad():
        other.head.weight.zero_()
    assert base_digest(one) == base_digest(other), "the trained part is none of it"
    other.base[1].bias.data[3] += 1
    assert base_digest(one) != base_digest(other)
    assert base_digest(one) != base_digest(one.to(torch.bfloat16))


def test_a_state_without_the_base_loads_over_it_and_no_other_gap_is_left() -> None:
    torch.manual_seed(1)
    module = OnABase()
    state = {name: torch.zeros_like(value) for name, value in without_base(module).items()}
    assert set(state) == {"head.weight", "head.bias"}
    before = module.base[1].weight.detach().clone()
    load_over_base(module, state)
    assert torch.equal(module.base[1].weight, before)
    assert not module.head.weight.any()
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        load_over_base(module, {"head.weight": state["head.weight"]})
    assert np.isfinite(before.numpy()).all()


def test_a_saved_model_is_without_the_base_and_refuses_another_one() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    from thinwire.spark.model import TorchModel

    def seeded() -> nn.Module:
        torch.manual_seed(3)
        return OnABase()

    found = fit(seeded)
    kept = TorchModel._of(found, seeded, None)
    assert len(kept._weights) < bytes_of(OnABase()) + 1_000
    kept._set(inputCols=["pixels"], task="classification")
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(kept.module(x), found.model(x))
    kept._skeleton = OnABase
    kept._token = "another"
    with pytest.raises(ConfigError, match="other frozen parameters"):
        kept.module(x)


def test_a_saved_model_whose_base_is_drawn_anew_each_time_keeps_it() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")
    from thinwire.spark.model import TorchModel

    found = fit()
    kept = TorchModel._of(found, OnABase, None)
    assert len(kept._weights) > bytes_of(OnABase(frozen=False)) - 1_000
    kept._set(inputCols=["pixels"], task="classification")
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(kept.module(x), found.model(x))
