"""Narrow parameters, float16 with a scaled loss, steps in pieces, compiled passes: each against plain float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError, WorkerError
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.calls import Given
from thinwire.replicas.widths import FIRST_SCALE, GROWS_AFTER, MOST_SCALE, Scale


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def narrow() -> nn.Module:
    return net().to(torch.bfloat16)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def fit(model: Any = net, **given: Any) -> tw.Result:
    asked: dict[str, Any] = {
        "inputs": ["pixels"], "optimizer": sgd, "steps": 30, "batch_size": 32, "cluster": tw.Simulated(workers=2),
        "strategy": tw.SparkNet(period=3), "progress": False,
    }  # fmt: skip
    return tw.fit(model, "digits", **asked | given)


def vector(result: tw.Result) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in result.model.parameters()])


STRATEGIES = [tw.Synchronous(), tw.SparkNet(period=3), tw.Relay(), tw.ParameterTable(consistency="strict")]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_a_bfloat16_network_learns_and_comes_back_as_it_was_made(strategy: tw.Strategy) -> None:
    found = fit(narrow, strategy=strategy, steps=None, epochs=10, validation=0.2)
    assert found.summary["val_accuracy"] > 0.85
    assert {p.dtype for p in found.model.parameters()} == {torch.bfloat16}


def test_steps_that_a_bfloat16_number_cannot_hold_are_not_lost() -> None:
    """Each is a thousandth of what separates two such numbers; together they are many of those."""

    def slow(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)

    wide, found = (fit(model, optimizer=slow, steps=300) for model in (net, narrow))
    torch.manual_seed(0)
    before = torch.cat([p.detach().flatten() for p in net().parameters()])
    moved, expected = vector(found) - before.bfloat16().float(), vector(wide) - before
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.5


def test_a_run_of_a_bfloat16_network_resumes_with_all_its_bits(tmp_path: Any) -> None:
    whole = fit(narrow, steps=20)
    fit(narrow, steps=9, out=str(tmp_path), checkpoint_every=9)
    assert torch.equal(vector(fit(narrow, steps=20, resume=str(tmp_path))), vector(whole))


@pytest.mark.parametrize("pieces", [2, 5, 32, 1000])
@pytest.mark.parametrize("strategy", STRATEGIES[:1] + STRATEGIES[3:], ids=lambda one: type(one).__name__)
def test_a_step_in_pieces_is_the_step_of_the_whole_batch(pieces: int, strategy: tw.Strategy) -> None:
    whole = fit(strategy=strategy)
    found = fit(strategy=strategy, accumulate=pieces)
    torch.testing.assert_close(vector(found), vector(whole), rtol=1e-4, atol=1e-5)
    assert found.summary["steps"] == whole.summary["steps"]
    assert found.summary["train_loss"] == pytest.approx(whole.summary["train_loss"], rel=1e-4)


@pytest.mark.parametrize("strategy", [tw.ParameterTable(tuple_size=500), tw.Synchronous()], ids=["table", "mean"])
def test_pieces_are_clipped_and_sent_as_one_gradient(strategy: tw.Strategy) -> None:
    """A table hears of gradients as backward makes them, and must not hear of the first piece's alone."""
    clip = None if isinstance(strategy, tw.ParameterTable) else 0.1
    asked: dict[str, Any] = {"strategy": strategy, "cluster": tw.Local(workers=1, processes=False), "clip_norm": clip}
    whole, found = fit(**asked), fit(**asked, accumulate=3)
    torch.testing.assert_close(vector(found), vector(whole), rtol=1e-4, atol=1e-5)


def test_pieces_count_by_the_weights_of_their_rows() -> None:
    rng = np.random.default_rng(0)
    rows = {
        "pixels": rng.random((200, 64)).astype(np.float32),
        "label": rng.integers(0, 10, 200),
        "weight": rng.integers(0, 3, 200).astype(np.float32),
    }
    asked: dict[str, Any] = {
        "inputs": ["pixels"], "weight": "weight", "optimizer": sgd, "steps": 10, "batch_size": 20, "progress": False,
        "cluster": tw.Simulated(workers=2), "strategy": tw.Synchronous(),
    }  # fmt: skip
    whole, found = tw.fit(net, rows, **asked), tw.fit(net, rows, accumulate=4, **asked)
    torch.testing.assert_close(vector(found), vector(whole), rtol=1e-4, atol=1e-5)


def test_float16_learns_by_a_scaled_loss() -> None:
    found = fit(precision="float16", steps=None, epochs=10, validation=0.2)
    assert found.summary["val_accuracy"] > 0.85
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert not found.summary["nonfinite"]


def test_a_float16_overflow_halves_the_scale_and_the_step_is_computed_again() -> None:
    def steep(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return 50.0 * nn.functional.cross_entropy(output, label)

    batch = _batch()
    half = TorchReplica(net, TrainSpec(loss=steep, optimizer=sgd, precision="float16", device="cpu"))
    wide = TorchReplica(net, TrainSpec(loss=steep, optimizer=sgd, device="cpu"))
    half.gradient(batch)
    wide.gradient(batch)
    assert Scale(half.gradients.memory).value < FIRST_SCALE
    for one, other in zip(half.parameters.tensors, wide.parameters.tensors, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.05)
    assert half.flaw(1.0) is None


def test_a_scale_grows_after_many_steps_without_an_overflow_and_not_for_ever() -> None:
    scale = Scale({})
    for _ in range(GROWS_AFTER):
        scale.held()
    assert scale.value == 2 * FIRST_SCALE
    for _ in range(40 * GROWS_AFTER):
        scale.held()
    assert scale.value == MOST_SCALE
    while scale.overflowed():
        assert scale.value >= 1.0


@pytest.mark.processes
def test_a_compiled_network_does_what_it_does_uncompiled() -> None:
    asked: dict[str, Any] = {"cluster": tw.Local(workers=1), "strategy": tw.Synchronous(), "steps": 4}
    plain, found = fit(**asked, validation=0.2), fit(**asked, validation=0.2, compile=True)
    torch.testing.assert_close(vector(found), vector(plain), rtol=1e-3, atol=1e-4)
    assert set(found.model.state_dict()) == set(net().state_dict())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"accumulate": 0}, "accumulate = 0"),
        ({"accumulate": 2.0}, "accumulate = 2.0"),
        ({"compile": 1}, "compile = 1"),
        ({"precision": "float8"}, "precision = 'float8'"),
        ({"accumulate": 2, "optimizer": {"name": "lbfgs"}, "strategy": tw.Synchronous()}, "leave accumulate at 1"),
        ({"accumulate": 2, "placement": tw.TensorParallel(group_size=2)}, "a placement computes a step's rows at once"),
        ({"precision": "float16", "placement": tw.TensorParallel(group_size=2)}, "a placement computes"),
        ({"compile": True, "placement": tw.TensorParallel(group_size=2)}, "a placement computes"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, WorkerError), match=told):
        fit(**given)


def test_a_placement_of_narrow_parameters_is_refused() -> None:
    with pytest.raises((ConfigError, WorkerError), match="a placement trains float32"):
        fit(narrow, placement=tw.TensorParallel(group_size=2))


def _batch() -> Any:
    from thinwire.data import Batch, Position

    generator = torch.Generator().manual_seed(0)
    inputs, label = torch.rand(16, 64, generator=generator), torch.arange(16) % 10
    assert Given((inputs,), ("x",)).names == ("x",)
    return Batch((inputs,), label, None, 16, Position(), ("x",))
