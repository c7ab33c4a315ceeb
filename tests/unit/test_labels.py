"""What a loss takes for labels, and how those that it cannot take are refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from thinwire.errors import DataError
from thinwire.replicas import TrainSpec
from thinwire.replicas.labels import ANY, Labels, WrongLabels, labels_of
from thinwire.replicas.objectives import LOSSES, Objective, accuracy
from thinwire.run.checks import metrics_for
from thinwire.run.job import Columns
from thinwire.run.trial import Trial

CLASSES = Labels("classes", "cross_entropy", ignored=-100, soft=True)


class Focal(nn.CrossEntropyLoss):
    """A loss of the user's own, made of torch's."""


class OfParts(nn.CrossEntropyLoss):
    """One that takes another output than torch's own."""

    def forward(self, output: Any, label: torch.Tensor) -> torch.Tensor:
        return super().forward(output["scores"], label)


def named(given: Any) -> str:
    """A test's name, the same in every process."""
    while isinstance(given, functools.partial):
        given = given.func
    return str(getattr(given, "__name__", given))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        ("cross_entropy", "classes"),
        ("nll", "classes"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "classes"),
        (nn.CrossEntropyLoss().forward, "classes"),
        (Focal(), "classes"),
        (nn.NLLLoss(), "classes"),
        (nn.MultiMarginLoss(), "classes"),
        (nn.MultiLabelMarginLoss(), "classes"),
        (F.cross_entropy, "classes"),
        (F.nll_loss, "classes"),
        (F.multi_margin_loss, "classes"),
        (functools.partial(functools.partial(F.cross_entropy, reduction="none"), label_smoothing=0.1), "classes"),
        ("mse", "numbers"),
        ("bce_with_logits", "numbers"),
        (nn.BCEWithLogitsLoss(), "numbers"),
        (nn.BCELoss(), "numbers"),
        (nn.HuberLoss(), "numbers"),
        (functools.partial(F.l1_loss, reduction="none"), "numbers"),
        (lambda output, label: F.cross_entropy(output, label), "any"),
        (nn.Linear(2, 2), "any"),
    ],
    ids=named,
)
def test_the_loss_decides_what_labels_are(loss: Any, kind: str) -> None:
    assert labels_of(loss).kind == kind


@pytest.mark.parametrize(
    ("loss", "scores"),
    [
        ("cross_entropy", True),
        ("bce_with_logits", True),
        ("mse", False),
        (nn.CrossEntropyLoss(), True),
        (nn.BCEWithLogitsLoss(), True),
        (nn.BCELoss(), False),  # probabilities, not logits
        (nn.MultiLabelMarginLoss(), False),
        (Focal(), True),
        (OfParts(), False),
    ],
    ids=named,
)
def test_accuracy_is_measured_and_classes_predicted_where_the_output_is_a_score_for_each(
    loss: Any, scores: bool
) -> None:
    assert labels_of(loss).scores is scores
    assert metrics_for(None, loss) == (("accuracy",) if scores else ())


def test_every_loss_that_has_a_name_says_what_it_takes() -> None:
    assert not [name for name in LOSSES if labels_of(name).kind == "any"]


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        ("cross_entropy", -100),
        (nn.CrossEntropyLoss(ignore_index=255), 255),
        (functools.partial(F.nll_loss, ignore_index=-1), -1),
        (functools.partial(functools.partial(F.nll_loss, ignore_index=-1), ignore_index=7), 7),
        (nn.MultiMarginLoss(), None),
    ],
    ids=named,
)
def test_the_value_that_a_loss_ignores_is_its_own(loss: Any, ignored: int | None) -> None:
    assert labels_of(loss).ignored == ignored


TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_labels_of_every_type_become_what_the_loss_wants(dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 1]).to(dtype)
    classes = CLASSES.tensor(given)
    assert (classes.dtype, classes.tolist()) == (torch.int64, [0, 1, 1])
    numbers = Labels("numbers").tensor(given)
    assert numbers.is_floating_point()
    assert numbers.dtype != torch.float64
    assert numbers.tolist() == [0.0, 1.0, 1.0]
    assert ANY.tensor(given).tolist() == given.tolist()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("classes", [None, 3])
def test_what_is_no_class_is_found(dtype: Any, classes: int | None) -> None:
    labels = CLASSES.measured(None if classes is None else (classes,))
    values = np.array([0.0, 2.0, -100.0, 1.5, -1.0, np.nan, np.inf, -np.inf, 3.0], dtype)
    expected = [False, False, False, True, True, True, True, True, classes is not None]
    assert labels.wrong(values).tolist() == expected


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "?"])
def test_whole_numbers_of_every_width_are_held_against_the_number_of_classes(dtype: str) -> None:
    values = np.array([0, 1], dtype)
    assert CLASSES.measured((2,)).wrong(values).tolist() == [False, False]
    assert CLASSES.measured((1,)).wrong(values).tolist() == [False, True]
    assert CLASSES.wrong(values).tolist() == [False, False]


def test_a_number_that_int64_does_not_hold_is_no_class() -> None:
    assert CLASSES.wrong(np.array([2**63, 5], np.uint64)).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_a_probability_for_each_class_stays_one(dtype: torch.dtype) -> None:
    given = torch.tensor([[0, 1, 0], [1, 0, 0]]).to(dtype)
    labels = CLASSES.measured((3,))
    assert labels.tensor(given).dtype == torch.float32
    assert not labels.wrong(given.numpy()).any()
    F.cross_entropy(torch.zeros(2, 3), labels.tensor(given))
    half = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert CLASSES.tensor(half).tolist() == half.tolist(), "floats, where the output's shape is not known"


def test_a_class_for_each_place_of_an_image_is_a_class() -> None:
    """The output is of 3 classes for 2 by 2 places, and labels are doubles."""
    labels = CLASSES.measured((3, 2, 2))
    given = torch.tensor([[[0.0, 2.0], [1.0, 1.0]]], dtype=torch.float64)
    assert labels.tensor(given).dtype == torch.int64
    assert labels.wrong((given + 0.5).numpy()).all()


def test_a_complaint_names_column_values_rows_count_and_a_remedy() -> None:
    wrong = WrongLabels(CLASSES.measured((3,)), "column 'label'")
    wrong.add(np.array([0.0, 1.0, 2.0]))
    wrong.add(np.array([2.5, 2.5, np.nan, 1.0]))
    with pytest.raises(DataError) as caught:
        wrong.refuse()
    text = str(caught.value)
    assert "column 'label' has 3 values that are no class, of 7 rows: 2.5 in row 3, nan in row 5" in text
    assert "whole numbers from 0 to 2, since the model has 3 outputs" in text
    assert "StringIndexer" in text


def test_two_classes_on_one_output_are_told_of_the_loss_for_them() -> None:
    wrong = WrongLabels(CLASSES.measured((1,)), "column 'label'")
    wrong.add(np.array([0, 1]))
    with pytest.raises(DataError, match=r"1 value that is no class(?s:.)*1 output(?s:.)*loss='bce_with_logits'"):
        wrong.refuse()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss(reduction="none")], ids=named)
def test_a_class_beyond_the_outputs_is_told_of_where_torch_refuses_it(loss: Any, weighted: bool) -> None:
    """Where nobody could tell the number of outputs before."""
    weight = torch.ones(3) if weighted else None
    with pytest.raises(DataError, match=r"2 values that are no class, of 3 rows: 4 in row 1, 9 in row 2"):
        Objective(loss).mean(torch.zeros(3, 4), torch.tensor([0, 4, 9]), weight)


def test_an_error_of_another_kind_is_left_as_it_is() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        Objective("cross_entropy").mean(torch.zeros(3, 4), torch.tensor([0, 1]), None)


def test_accuracy_takes_the_likeliest_of_probabilities() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1]])
    assert accuracy(scores, torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.2, 0.7]])).tolist() == [1.0, 0.0]


class Drawing(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        np.random.rand()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.random.rand()
        found: torch.Tensor = self.layer(x + torch.rand(()))
        return found


def trial(model: Any, columns: Columns) -> Trial:
    spec = TrainSpec(loss=lambda output: output.mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return Trial(model, spec, columns, 8, transforms=False, validated=False)


@pytest.mark.parametrize("model", [Drawing, Drawing()], ids=["factory", "module"])
def test_a_row_that_tells_the_number_of_outputs_leaves_nothing_changed(model: Any) -> None:
    import pyarrow as pa

    kept = {k: v.clone() for k, v in model.state_dict().items()} if isinstance(model, nn.Module) else {}
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    row = pa.RecordBatch.from_pydict({"x": pa.array([[1.0, 2.0, 3.0, 4.0]])})
    columns = Columns(inputs=("x",), label=None)
    assert trial(model, columns)(row) == (6,)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    for name, value in kept.items():
        assert torch.equal(value, model.state_dict()[name])


class OnWorkersOnly(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("there is no such disk on the driver")


def test_a_model_that_says_itself_that_it_cannot_run_is_left_to_the_workers() -> None:
    import pyarrow as pa

    row = pa.RecordBatch.from_pydict({"x": pa.array([[1.0, 2.0]])})
    assert trial(lambda: OnWorkersOnly(2, 2), Columns(inputs=("x",), label=None))(row) is None
