"""A step over several batches is the step over all their rows, whatever a loss divides by; or the loss is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError
from thinwire.replicas.objectives import Objective

ROWS, STEPS = 120, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 4)).astype("f4")
Y = RANDOM.integers(0, 3, ROWS)
PADDED = np.where(np.arange(ROWS) % 7 < 4, -100, Y)
WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
TOGETHER: dict[str, dict[str, Any]] = {
    "Synchronous": {},
    "table": {"strategy": tw.ParameterTable(consistency="strict")},
    "Planned": {"placement": tw.Planned(group_size=2), "workers": 4},
    "TensorParallel": {"placement": tw.TensorParallel(group_size=2), "workers": 4},
    "accumulate": {"accumulate": 4, "workers": 1},
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def fitted(loss: Any, label: Any, log: list[events.Event], workers: int = 3, **arguments: Any) -> tw.Result:
    given = {"strategy": tw.Synchronous(), "batch_size": ROWS, "steps": STEPS, "optimizer": sgd, "progress": False}
    rows = {"x": X, "label": label}
    cluster = tw.Simulated(workers=workers, step_s=0.01)
    return tw.fit(net, rows, loss=loss, cluster=cluster, validation=rows, callbacks=[log.append], **given | arguments)


@pytest.mark.parametrize("where", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), Y),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), PADDED),
        (nn.CrossEntropyLoss(ignore_index=2), Y),
        ("cross_entropy", PADDED),
        (F.cross_entropy, PADDED),
        (lambda output, label: F.cross_entropy(output, label, reduction="none"), Y),
    ],
    ids=["weights", "weights, smoothing and padding", "ignored class", "padding by name", "padding", "one a row"],
)
def test_a_step_and_an_evaluation_count_what_the_loss_counts(loss: Any, label: Any, where: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = net()
    optimizer, one = sgd(module.parameters()), F.cross_entropy if loss == "cross_entropy" else loss
    inputs, labels = torch.from_numpy(X), torch.from_numpy(label)
    for _step in range(STEPS):
        optimizer.zero_grad()
        one(module(inputs), labels).mean().backward()
        optimizer.step()
    found = fitted(loss, label, [], **where)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert found.summary["val_loss"] == pytest.approx(one(module(inputs), labels).mean().item(), rel=1e-4)


@pytest.mark.parametrize("where", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "CrossEntropyLoss' sums over rows"),
        (lambda output, label: F.cross_entropy(output, label, reduction="sum"), "<lambda>' sums over rows"),
        (lambda output, label: F.cross_entropy(output, label, weight=WEIGHTS), "<lambda>' weighs rows by their labels"),
    ],
    ids=["sum", "sum of one's own", "weights of one's own"],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused(loss: Any, told: str, where: dict[str, Any]) -> None:
    log: list[events.Event] = []
    with pytest.raises(ConfigError, match=f"{told}.*reduction='none'"):
        fitted(loss, Y, log, **where)
    assert not log, "refused before anything runs"


@pytest.mark.parametrize("where", [{"strategy": tw.SparkNet(period=2)}, {"workers": 1}], ids=["SparkNet", "one worker"])
def test_a_loss_that_sums_is_taken_where_each_worker_steps_by_itself(where: dict[str, Any]) -> None:
    assert fitted(nn.CrossEntropyLoss(reduction="sum"), Y, [], **where).summary["steps"] == STEPS


def contrastive(output: Tensor, label: Tensor) -> Tensor:
    """It compares the rows of a batch with each other."""
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def test_a_loss_of_pairs_of_rows_is_taken() -> None:
    assert fitted(contrastive, Y, []).summary["steps"] == STEPS


def test_an_evaluation_of_ignored_labels_alone_counts_nothing() -> None:
    output, label = torch.randn(3, 4), torch.full((3,), -100)
    assert Objective("cross_entropy").total(output, label, None, 3) == (0.0, 0.0)
