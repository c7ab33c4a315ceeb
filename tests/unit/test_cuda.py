"""Replicas on a GPU: the flat vector lies there, the joint model on the host, and training works all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.models import cnn8
from thinwire.parameters import FlatParameters
from thinwire.replicas import TorchReplica, TrainSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STRATEGIES = [
    tw.Synchronous(),
    tw.SparkNet(period=5),
    tw.MPCA(),
    tw.MPCA(form="gradient"),
    tw.DiLoCo(period=10, momentum=0.5),
    tw.Relay(),
    tw.EASGD(period=5),
    tw.EASGD(period=5, momentum=0.5),
    tw.DeepSpark(period=5),
    tw.ParameterTable(consistency="strict"),
]


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def test_the_flat_vector_of_a_cuda_model_is_on_its_device() -> None:
    flat = FlatParameters(cnn8().cuda())
    assert flat.vector.is_cuda
    assert all(p.is_cuda and p.data_ptr() >= flat.vector.data_ptr() for p in flat.tensors)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_two_workers_train_on_a_gpu(strategy: tw.Strategy) -> None:
    result = tw.fit(
        cnn8,
        "digits",
        inputs=["pixels"],
        optimizer=momentum_sgd,
        strategy=strategy,
        cluster=tw.Local(workers=2, processes=False),
        epochs=30,
        batch_size=32,
        validation=0.2,
        progress=False,
    )
    assert result.summary["val_accuracy"] >= 0.95
    assert next(result.model.parameters()).device.type == "cpu"


def test_a_loss_that_is_not_finite_is_found_on_a_gpu_too() -> None:
    from thinwire.errors import DivergedError

    calls = [0]

    def poisoned(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        loss = torch.nn.functional.cross_entropy(output, label)
        return loss * float("nan") if calls[0] == 20 else loss

    with pytest.raises(DivergedError, match="at step 20"):  # found some steps later: there is nothing to go back to
        tw.fit(
            cnn8,
            "digits",
            inputs=["pixels"],
            loss=poisoned,
            metrics=(),
            optimizer=momentum_sgd,
            cluster=tw.Local(workers=1, processes=False),
            epochs=5,
            progress=False,
        )


def test_a_replica_s_state_goes_through_the_host_and_back() -> None:
    spec = TrainSpec(loss="cross_entropy", optimizer=momentum_sgd, device="cuda")
    replica = TorchReplica(cnn8, spec)
    tree = replica.tree()
    assert not tree["vector"].is_cuda
    with torch.no_grad():
        replica.vector.zero_()
    replica.load(tree)
    assert torch.equal(replica.vector.cpu(), tree["vector"])


@pytest.mark.parametrize(
    "given",
    [{"precision": "float16"}, {"accumulate": 3}, {"precision": "float16", "accumulate": 2}, {"compile": True}],
    ids=str,
)
def test_float16_pieces_and_compiled_passes_train_on_a_gpu(given: dict[str, Any]) -> None:
    result = tw.fit(
        cnn8,
        "digits",
        inputs=["pixels"],
        optimizer=momentum_sgd,
        cluster=tw.Local(workers=1, processes=False),
        epochs=10,
        batch_size=32,
        validation=0.2,
        progress=False,
        **given,
    )
    assert result.summary["val_accuracy"] > 0.9
    assert not result.summary["nonfinite"]


def test_a_float16_overflow_on_a_gpu_is_computed_again_with_half_the_scale() -> None:
    from thinwire.replicas.widths import FIRST_SCALE, Scale

    def steep(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return 1000.0 * torch.nn.functional.cross_entropy(output, label)

    replica = TorchReplica(cnn8, TrainSpec(loss=steep, optimizer=momentum_sgd, precision="float16", device="cuda"))
    from thinwire.data import Batch, Position

    batch = Batch((torch.rand(16, 1, 8, 8).cuda(),), (torch.arange(16) % 10).cuda(), None, 16, Position())
    replica.gradient(batch)
    assert Scale(replica.gradients.memory).value < FIRST_SCALE
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in replica.parameters.tensors)


def test_a_bfloat16_network_trains_on_a_gpu() -> None:
    result = tw.fit(
        lambda: cnn8().to(torch.bfloat16),
        "digits",
        inputs=["pixels"],
        optimizer=momentum_sgd,
        cluster=tw.Local(workers=1, processes=False),
        epochs=10,
        validation=0.2,
        progress=False,
    )
    assert result.summary["val_accuracy"] > 0.9
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
