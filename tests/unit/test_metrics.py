"""A metric of one's own is that of all validation rows of all workers, or it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import ConfigError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(1200, 4)).astype(np.float32)
LABEL = ((X[:, 0] > 0.9) & (RANDOM.random(1200) < 0.8)).astype(np.int64)
"""Few are positive, so that batches differ in their F1."""
HELD = {"x": X[400:], "label": LABEL[400:]}


def positives(output: Tensor, label: Tensor) -> dict[str, Tensor]:
    found = output.argmax(1)
    return {"tp": ((found == 1) & (label == 1)).sum(), "wrong": (found != label).sum()}


def f1(tp: Tensor, wrong: Tensor) -> Tensor:
    return 2 * tp / (2 * tp + wrong)


def run(workers: int = 3, **metrics: Any) -> tw.Result:
    return tw.fit(
        lambda: nn.Linear(4, 2),
        {"x": X[:400], "label": LABEL[:400]},
        validation=HELD,
        metrics=metrics,
        epochs=3,
        batch_size=8,
        optimizer={"name": "sgd", "lr": 0.3},
        cluster=tw.Simulated(workers=workers, step_s=0.01),
    )


def of_all_rows(model: nn.Module) -> float:
    with torch.no_grad():
        found = model(torch.from_numpy(HELD["x"])).argmax(1)
    return float(f1_score(HELD["label"], found.numpy()))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_metric_of_sums_is_that_of_all_rows_of_all_workers(workers: int) -> None:
    result = run(workers, f1=tw.MetricOfSums(sums=positives, compute=f1))
    assert result.summary["val_f1"] == pytest.approx(of_all_rows(result.model), abs=1e-12)
    assert 0.2 < result.summary["val_f1"] < 1.0
    assert [row["val_f1"] for row in result.history][-1] == result.summary["val_f1"]


def test_sums_may_be_tensors_of_any_shape() -> None:
    def confusion(output: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {"seen": torch.bincount(label * 2 + output.argmax(1), minlength=4).reshape(2, 2)}

    def of(seen: Tensor) -> float:
        assert seen.shape == (2, 2)
        return float(2 * seen[1, 1] / (2 * seen[1, 1] + seen[0, 1] + seen[1, 0]))

    result = run(3, f1=tw.MetricOfSums(sums=confusion, compute=of))
    assert result.summary["val_f1"] == pytest.approx(of_all_rows(result.model), abs=1e-12)


def test_a_target_may_name_a_metric_of_sums() -> None:
    result = tw.fit(
        lambda: nn.Linear(4, 2),
        {"x": X[:400], "label": LABEL[:400]},
        validation=HELD,
        metrics={"f1": tw.MetricOfSums(sums=positives, compute=f1)},
        until="val_f1 >= 0.1",
        epochs=60,
        optimizer={"name": "sgd", "lr": 0.3},
        cluster=tw.Simulated(workers=2, step_s=0.01),
    )
    assert result.summary["reason"] == "target reached: val_f1 >= 0.1"


def test_one_number_a_row_is_the_mean_over_all_rows() -> None:
    result = run(3, right=lambda output, label: (output.argmax(1) == label).float())
    with torch.no_grad():
        found = result.model(torch.from_numpy(HELD["x"])).argmax(1)
    assert result.summary["val_right"] == pytest.approx(float((found.numpy() == HELD["label"]).mean()), abs=1e-6)


def test_one_number_for_a_batch_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.f1 gives one number for a batch.*MetricOfSums"):
        run(2, f1=lambda output, label: f1(**positives(output, label)))


def test_one_number_for_a_batch_may_be_said_to_be_the_mean_over_its_rows() -> None:
    result = run(3, right=tw.MeanOfBatch(lambda output, label: (output.argmax(1) == label).float().mean()))
    with torch.no_grad():
        found = result.model(torch.from_numpy(HELD["x"])).argmax(1)
    assert result.summary["val_right"] == pytest.approx(float((found.numpy() == HELD["label"]).mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (lambda output, label: torch.ones(3), "3 numbers for"),
        (tw.MetricOfSums(sums=lambda o, y: 3, compute=f1), "it must give sums by name"),
        (tw.MetricOfSums(sums=lambda o, y: {"all": torch.ones(10_000)}, compute=f1), "at most 8192"),
        (tw.MetricOfSums(sums=positives, compute=lambda tp: tp), "compute failed with the sums"),
        (3, "3 is not possible"),
        (tw.MetricOfSums, "the class MetricOfSums is not possible"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused(metric: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"metrics\.mine.*{told}"):
        run(2, mine=metric)


def test_a_metric_of_torchmetrics_is_merged_by_its_states() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    result = run(3, macro=classification.MulticlassF1Score(num_classes=2, average="macro"))
    with torch.no_grad():
        found = result.model(torch.from_numpy(HELD["x"])).argmax(1)
    assert result.summary["val_macro"] == pytest.approx(f1_score(HELD["label"], found, average="macro"), abs=1e-6)
    with pytest.raises(ConfigError, match=r"metrics\.area is a BinaryAUROC, whose state 'preds' is no sum over rows"):
        run(2, area=classification.BinaryAUROC())


def test_a_metric_that_would_stand_in_the_place_of_the_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="would stand in the place of the loss"):
        run(2, loss=lambda output, label: (output.argmax(1) == label).float())


class Scores(nn.Module):
    """Half of torchmetrics' interface: states whose reductions are not said."""

    def update(self, output: Tensor, label: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0

    def forward(self, output: Tensor, label: Tensor) -> float:
        return 0.0


def test_an_object_with_states_that_cannot_be_added_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.mine is a Scores, whose states cannot be added up"):
        run(2, mine=Scores())
