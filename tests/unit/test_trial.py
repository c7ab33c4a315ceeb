"""The first row is tried on the driver: what does not fit is told before a worker starts."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import ConfigError, DataError, ThinwireError, WorkerError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype(np.float32)
LABEL = RANDOM.integers(0, 3, 64)
LABEL[0] = 2


class Unlaunched(tw.Local):
    """Workers that must not be started."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a worker was started")


HERE = Unlaunched(workers=2, processes=False)


def refused(model: Any, data: Any, told: str, kind: type[ThinwireError] = DataError, **arguments: Any) -> None:
    with pytest.raises(kind, match=f"(?s){told}"):
        tw.fit(model, data, cluster=HERE, **({"epochs": 1, "progress": False} | arguments))


class Pair(nn.Module):
    def __init__(self, training_only: bool = False) -> None:
        super().__init__()
        self.layer, self.training_only = nn.Linear(4, 3), training_only

    def forward(self, x: Tensor) -> Any:
        found = self.layer(x)
        return (found, x) if self.training or not self.training_only else found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.layer(x + y)
        return out


def linear(ins: int = 4, outs: int = 3) -> Any:
    return lambda: nn.Linear(ins, outs)


ROWS = {"x": X, "label": LABEL}


def test_rows_of_another_length_than_the_model_takes_are_refused_by_their_column() -> None:
    refused(
        linear(5), ROWS, r"cannot take a row of inputs=\['x'\]: 'x' of float32 in the shape \(4,\) a row.*Give rows"
    )


def test_several_columns_of_single_numbers_are_refused_with_how_to_put_them_together() -> None:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": LABEL})
    refused(
        linear(2), frame, r"'a' of float32 in the shape \(\).*called with 2 tensors.*VectorAssembler", inputs=["a", "b"]
    )


def test_a_single_column_of_single_numbers_is_refused_with_how_to_shape_it() -> None:
    frame = pd.DataFrame({"a": X[:, 0], "label": LABEL})
    refused(linear(1), frame, "A column of numbers gives one number a row", inputs=["a"])


def test_an_output_whose_first_dimension_is_not_that_of_rows_is_refused() -> None:
    refused(lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), ROWS, "its first dimension must count rows")


def test_more_columns_than_the_model_takes_are_refused() -> None:
    refused(linear(), {"x": X, "y": X, "label": LABEL}, r"inputs=\['x', 'y'\]: .*takes 2 positional arguments")


def test_fewer_columns_than_the_model_takes_are_refused() -> None:
    refused(Two, ROWS, r"inputs=\['x'\]: .*missing 1 required positional argument")


def test_bytes_for_a_layer_of_floats_are_refused_by_type() -> None:
    refused(linear(), {"x": X.astype(np.uint8), "label": LABEL}, "'x' of uint8 .*by a transform or in the model")


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy])
@pytest.mark.parametrize("model", [Pair, lambda: Pair(training_only=True)], ids=["always", "in training"])
def test_an_output_that_is_a_tuple_is_refused(model: Any, loss: Any) -> None:
    refused(model, ROWS, r"the model's output is a tuple of 2 \(Tensor, Tensor\)", ConfigError, loss=loss)


def test_a_loss_that_takes_a_tuple_apart_is_taken() -> None:
    result = tw.fit(
        Pair,
        ROWS,
        loss=lambda output, label: F.cross_entropy(output[0], label),
        cluster=tw.Local(workers=1, processes=False),
    )
    assert result.summary["epochs"] == 1.0


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss()])
def test_a_label_beyond_the_outputs_is_refused_with_its_row(loss: Any) -> None:
    refused(linear(4, 2), ROWS, "column 'label' has .* no class, of 64 rows: 2 in row 0", loss=loss)


def test_a_label_beyond_the_outputs_is_refused_under_a_loss_of_ones_own() -> None:
    refused(
        linear(4, 2),
        ROWS,
        r"column 'label' does not fit the model's output: loss '<lambda>' fails with IndexError.*first label 2",
        loss=lambda output, label: F.cross_entropy(output, label),
    )


@pytest.mark.parametrize("loss", ["mse", "l1", "smooth_l1", "bce_with_logits"])
def test_more_outputs_than_numbers_in_a_label_are_refused(loss: str) -> None:
    refused(
        linear(4, 3), {"x": X, "label": X[:, 0]}, rf"column 'label' has 1 number a row.* 3 numbers.*{loss}", loss=loss
    )


@pytest.mark.parametrize("loss", ["bce_with_logits", nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits])
def test_labels_that_a_logit_cannot_be_compared_with_are_refused_with_their_rows(loss: Any) -> None:
    label = (LABEL % 2).astype(np.float32)
    label[5] = 2.0
    told = "column 'label' has 1 value that is not from 0 to 1, of 64 rows: 2.0 in row 5"
    refused(lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), {"x": X, "label": label}, told, loss=loss)


@pytest.mark.parametrize("weight", [-np.ones(64, np.float32), np.ones((64, 2), np.float32), np.full(64, np.inf)])
def test_a_weight_that_is_no_weight_is_refused(weight: Any) -> None:
    refused(linear(), ROWS | {"w": weight}, "column 'w' is .* in the first row; a weight is one number", weight="w")


def test_a_column_that_validation_data_lack_is_told_as_theirs() -> None:
    refused(linear(), ROWS, "the validation data does not have .* column 'x'", validation={"y": X, "label": LABEL})


def test_a_plateau_without_validation_rows_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="scheduler 'plateau' has no effect"):
        tw.fit(linear(), ROWS, scheduler="plateau", cluster=tw.Simulated(workers=1, step_s=0.01))


def test_one_output_and_a_label_of_one_number_are_compared_as_meant() -> None:
    result = tw.fit(linear(4, 1), {"x": X, "label": X[:, 0]}, loss="mse", cluster=tw.Simulated(workers=2, step_s=0.01))
    assert result.summary["epochs"] == 1.0


def test_a_loss_that_compares_every_row_with_every_label_is_refused() -> None:
    refused(linear(4, 1), {"x": X, "label": X[:, 0]}, "compares every row with every label", loss=nn.MSELoss())


def test_labels_in_a_column_of_arrays_of_one_are_refused_for_classes() -> None:
    refused(linear(), {"x": X, "label": LABEL[:, None]}, "column 'label' does not fit the model's output")


def test_a_loss_without_gradient_is_refused() -> None:
    frozen = nn.Linear(4, 3).requires_grad_(False)
    refused(frozen, ROWS, "has no parameter that can be trained", ConfigError)
    refused(nn.Identity, ROWS, "has no parameter that can be trained", ConfigError)
    refused(linear(), ROWS, "the loss gives a float", ConfigError, loss=lambda o, y: o.sum().item())
    refused(linear(), ROWS, "does not depend on any parameter", ConfigError, loss=lambda o, y: o.detach().mean())


def test_a_column_of_text_is_refused_before_a_worker_starts() -> None:
    frame = pd.DataFrame({"x": ["a", "b"] * 32, "label": LABEL})
    refused(linear(), frame, "column 'x'.*must be numbers", inputs=["x"])
    words = {"x": X, "label": np.array(["cat", "dog"] * 32)}
    refused(linear(), words, "column 'label' holds .*string")
    refused(linear(), words, "column 'label'.*must be numbers", loss="mse")


CALLED: list[Any] = []


def counting(columns: dict[str, Any]) -> dict[str, Any]:
    """A transform that leaves something behind."""
    CALLED.append(len(columns["x"]))
    return {"x": columns["x"][:, :2], "label": columns["label"]}


def test_a_transform_of_the_users_own_is_tried_as_a_copy() -> None:
    called: list[Any] = []

    def keeping(columns: dict[str, Any]) -> dict[str, Any]:
        called.append(columns)
        return counting(columns)

    refused(
        linear(), ROWS, r"cannot take a row of inputs=\['x'\]: 'x' of float32 in the shape \(2,\)", transform=keeping
    )
    refused(linear(), ROWS, r"inputs=\['x'\]: 'x' of float32 in the shape \(2,\)", transform=counting)
    assert (called, CALLED) == ([], []), "a trial leaves nothing behind"


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (lambda columns: None, "the transform returned NoneType"),
        (lambda columns: {"x": columns["x"]}, "column 'label' is missing after the transform"),
        (lambda columns: columns | {"x": columns["x"][:1]}, "column 'x' has 1 rows after the transform"),
        (lambda columns: columns | {"label": columns["label"] + 7}, "column 'label' after the transform has 7 values"),
    ],
    ids=["nothing", "a column short", "fewer rows", "labels beyond the outputs"],
)
def test_what_a_transform_makes_is_looked_at_on_the_driver(transform: Any, told: str) -> None:
    refused(linear(), ROWS, told, transform=transform)


def test_labels_are_looked_at_as_a_transform_makes_them() -> None:
    names = np.array(["a", "b", "c"])[LABEL]
    made = lambda columns: {"x": columns["x"], "label": torch.tensor([ord(n) - ord("a") for n in columns["label"]])}  # noqa: E731
    here = tw.Local(workers=2, processes=False)
    assert tw.fit(linear(), {"x": X, "label": names}, transform=made, cluster=here).summary["rows"] == 64


def test_what_a_transform_raises_is_left_to_the_workers() -> None:
    def failing(columns: dict[str, Any]) -> dict[str, Any]:
        raise FileNotFoundError("a file that only workers have")

    with pytest.raises(WorkerError, match="a file that only workers have"):
        tw.fit(linear(), ROWS, transform=failing, cluster=tw.Local(workers=1, processes=False))


def test_a_transform_that_cannot_be_copied_is_left_to_the_workers() -> None:
    lock = threading.Lock()

    def locked(columns: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return columns

    result = tw.fit(linear(), ROWS, transform=locked, cluster=tw.Local(workers=1, processes=False))
    assert result.summary["rows"] == 64


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda parameters: None, "optimizer gave a NoneType"),
        (lambda: torch.optim.SGD([], lr=0.1), "optimizer fails with TypeError"),
        (
            lambda parameters: torch.optim.SGD(parameters, lr=-1.0),
            "optimizer fails with ValueError: Invalid learning rate",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(optimizer: Any, told: str) -> None:
    refused(linear(), ROWS, told, ConfigError, optimizer=optimizer)


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (torch.optim.lr_scheduler.StepLR, "scheduler fails with TypeError"),
        (lambda optimizer: 0.1, "scheduler gave a float"),
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 0), "scheduler fails with ZeroDivisionError"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_refused(scheduler: Any, told: str) -> None:
    refused(linear(), ROWS, told, ConfigError, scheduler=scheduler)


def test_a_metric_that_fails_is_refused() -> None:
    metrics = {"near": lambda output, label: (output - label).abs().mean(1)}
    refused(linear(), ROWS, "metrics.near fails with RuntimeError", ConfigError, metrics=metrics, validation=0.25)


def test_batch_normalisation_of_single_rows_is_refused() -> None:
    model = lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))  # noqa: E731
    refused(model, ROWS, "give a larger batch_size", batch_size=1)


def test_a_model_of_float64_is_refused_with_how_to_make_it_float32() -> None:
    refused(lambda: nn.Linear(4, 3).double(), ROWS, r"torch\.float64.*as by model\.float\(\)", ConfigError)


class Boom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("boom")


def test_what_the_users_code_raises_by_itself_is_told_by_a_worker_with_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"(?s)RuntimeError: boom.*Traceback"):
        tw.fit(Boom(4, 3), ROWS, cluster=tw.Simulated(workers=1, step_s=0.01))


class OfEight(nn.Module):
    """A model that takes batches of eight rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.reshape(8, 4))
        return found


def test_a_model_that_takes_batches_of_one_size_only_is_tried_with_that_size() -> None:
    result = tw.fit(OfEight, ROWS, batch_size=8, cluster=tw.Simulated(workers=1, step_s=0.01))
    assert result.summary["steps"] == 8


class Remembering(nn.Module):
    """Draws from every generator, and measures statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.layer = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        found: Tensor = self.layer(self.drop(self.norm(x)))
        return found


def test_trying_a_row_changes_neither_the_model_nor_a_generator() -> None:
    model = Remembering()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="optimizer gave"):
        tw.fit(model, ROWS, cluster=HERE, optimizer=lambda p: None)  # type: ignore[arg-type,return-value]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.training
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
