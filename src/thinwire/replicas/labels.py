"""What a loss takes for labels: classes, numbers, or whatever the data holds. The loss decides, never the values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor, nn

from thinwire.errors import DataError
from thinwire.replicas.quantiles import QUANTILES, QuantileLoss

Kind = Literal["any", "classes", "numbers"]
IGNORED = -100
"""What torch leaves out of a loss over classes unless told otherwise."""
_WIDER = {"f2": np.float32, "b1": np.uint8}
"""Types that cannot be compared with every number, by kind and bytes."""
MOST_OFF = 1e-2
"""By which the probabilities of a row's classes may differ from 1 together: some were stored in few bits."""
SHOWN = 3
"""Different wrong values in a message."""


@final
@dataclass(frozen=True)
class Labels:
    """What a loss takes for labels.

    Attributes:
        kind: class indices, which are int64; numbers, which are floats; or any, taken as they come.
        loss: its name, for messages.
        ignored: a value beside the classes that the loss leaves out.
        soft: whether it also takes a probability for each class: labels in the shape of the model's output.
        scores: whether it takes the model's output for scores of classes, or for the logit of one of two.
        output: the shape of the model's output for one row, classes first; None where it is not known.
        share: whether numbers must be from 0 to 1.
    """

    kind: Kind = "any"
    loss: str = ""
    ignored: int | None = None
    soft: bool = False
    scores: bool = False
    output: tuple[int, ...] | None = None
    share: bool = False

    @property
    def num_classes(self) -> int | None:
        return self.output[0] if self.output else None

    def measured(self, output: tuple[int, ...] | None) -> Labels:
        """The same of a model whose output for one row has this shape."""
        return replace(self, output=output)

    def are_classes(self, shape: tuple[int, ...], floating: bool) -> bool:
        """Whether labels are class indices, and not a probability for each class.

        Args:
            shape: of one row's label.
            floating: whether they are floats.
        """
        if self.kind != "classes" or not (self.soft and shape):
            return self.kind == "classes"
        return shape != self.output if self.output else not floating

    def tensor(self, label: Tensor) -> Tensor:
        """A batch's labels in the type that the loss wants; their values have been looked at before."""
        floating = label.is_floating_point()
        if self.are_classes(tuple(label.shape[1:]), floating):
            return label.long()
        if self.kind == "any":
            wide = not floating and label.dtype != torch.bool
            return label.long() if wide else _narrowed(label)
        return _narrowed(label) if floating else label.float()

    def wrong(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which values, rows first, are no class: not whole, not finite, negative, or of more classes than there are.

        >>> Labels("classes", "cross_entropy").measured((3,)).wrong(np.array([0.0, 2.0, 1.5, 3.0, -1.0, np.nan]))
        array([False, False,  True,  True,  True,  True])
        """
        floating = values.dtype.kind == "f"
        values = values.astype(_WIDER.get(values.dtype.kind + str(values.itemsize), values.dtype), copy=False)
        if self.share:
            return ~np.asarray((values >= 0) & (values <= 1))
        if self.kind == "numbers":
            return np.asarray(~np.isfinite(values))
        if not self.are_classes(values.shape[1:], floating):
            return self._wrong_shares(values)
        most = self.num_classes if self.num_classes is not None else 2.0**63 if floating else 2**63
        found = np.asarray((values < 0) | (values >= most))
        if floating:
            found |= ~np.isfinite(values) | (values != np.floor(values))
        return found if self.ignored is None else found & (values != self.ignored)

    def _wrong_shares(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which values are not a class's probability, or of a row whose probabilities are not 1 together."""
        if not self.soft or values.ndim < 2:
            return np.zeros(values.shape, bool)
        found = ~np.asarray((values >= 0) & (values <= 1))
        total = values.sum(1, keepdims=True, dtype=np.float64)
        alone = np.broadcast_to(~(np.abs(total - 1) <= MOST_OFF), values.shape)
        return np.asarray(found | alone)

    def refuse_wrong(self, where: str, label: Tensor) -> None:
        """Raises a DataError where a batch's labels are no classes; `where` is what the message begins with."""
        if self.kind != "any":
            count = WrongLabels(self, where)
            values = label.detach().cpu()
            count.add((values.float() if values.dtype == torch.bfloat16 else values).numpy())
            count.refuse()


@final
class WrongLabels:
    """Counts the labels that are no classes, over all arrays of a column.

    Args:
        labels: what the loss takes.
        where: what holds them, for the message.
    """

    def __init__(self, labels: Labels, where: str) -> None:
        self.labels, self._where = labels, where
        self._rows = self._count = 0
        self._examples: dict[str, int] = {}
        self._first: np.ndarray[Any, Any] | None = None
        self._differ = self._shares = False

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Looks at some more, rows first."""
        if len(values) and not self._differ:
            self._first = values[0].copy() if self._first is None else self._first
            self._differ = values.shape[1:] != self._first.shape or bool((values != self._first).any())
        wrong = self.labels.wrong(values)
        if count := int(np.count_nonzero(wrong)):
            self._count += count
            floating = values.dtype.kind == "f"
            self._shares = self.labels.kind == "classes" and not self.labels.are_classes(values.shape[1:], floating)
            for at in np.argwhere(wrong):
                self._examples.setdefault(str(values[tuple(at)].item()), self._rows + int(at[0]))
                if len(self._examples) == SHOWN:
                    break
        self._rows += len(values)

    def refuse(self) -> None:
        """Raises a DataError with values, rows and count, where there are any."""
        if self._count:
            raise DataError(self._complaint())

    @property
    def same(self) -> str | None:
        """The label that all rows have; None where labels differ, or where there are not two."""
        return (
            str(self._first.tolist())[:80] if self._rows > 1 and not self._differ and self._first is not None else None
        )

    def _complaint(self) -> str:
        classes, loss = self.labels.num_classes, self.labels.loss
        values = "1 value that is" if self._count == 1 else f"{self._count} values that are"
        shown = ", ".join(f"{value} in row {row}" for value, row in self._examples.items())
        if self.labels.share:
            found = values.replace("that is", "that is not from 0 to 1").replace("that are", "that are not from 0 to 1")
            return (
                f"{self._where} has {found}, of {self._rows} rows: {shown}. {loss} takes 0, 1, or a probability. Make "
                "labels of two classes 0 and 1; for more classes use loss='cross_entropy', for quantities 'mse'."
            )
        if self.labels.kind == "numbers":
            found = values.replace("that is", "that is not finite").replace("that are", "that are not finite")
            return (
                f"{self._where} has {found}, of {self._rows} rows: {shown}. {loss} takes finite numbers. Leave those "
                "rows out, or fill them."
            )
        if self._shares:
            return (
                f"{self._where} has {values} no probability of a class, of {self._rows} rows: {shown}. {loss} takes "
                "whole numbers from 0, one a class, or for each class a probability from 0 to 1, together 1. For "
                "several classes of a row at once use loss='bce_with_logits'."
            )
        allowed, advice = "from 0 on", "Index the labels from 0 (StringIndexer, pandas.factorize)"
        if classes == 1:
            allowed = "of 0 alone, since the model has 1 output"
            advice = "Give the model an output for each class, or two classes to loss='bce_with_logits'"
        elif classes is not None:
            allowed = f"from 0 to {classes - 1}, since the model has {classes} outputs"
            advice += ", or give the model an output for each class"
        return (
            f"{self._where} has {values} no class, of {self._rows} rows: {shown}. {loss} takes whole numbers "
            f"{allowed}. {advice}; for labels that are quantities use a loss such as 'mse'."
        )


def nothing_to_learn(column: str, rows: int, label: str) -> str:
    """The warning for a column of labels that are all the same."""
    return (
        f"column {column!r} is {label} in all of {rows} rows: there is nothing to tell apart, and every model comes to "
        "give the same answer; look at how the rows were chosen"
    )


def labels_of(loss: object) -> Labels:
    """What a loss takes: one by name, or torch's own as a module, a function, or a partial of one.

    >>> labels_of(nn.CrossEntropyLoss(ignore_index=255)).ignored, labels_of("mse").kind, labels_of(lambda o, y: o).kind
    (255, 'numbers', 'any')
    """
    given, settings = _bare(loss)
    name, taken = _known(given)
    if taken is None:
        return ANY
    if taken.kind == "classes" and taken.ignored == IGNORED:
        ignored = settings.get("ignore_index", getattr(given, "ignore_index", IGNORED))
        taken = replace(taken, ignored=int(ignored))
    return replace(taken, loss=name)


def counted_of(loss: object) -> Callable[[Tensor], Tensor] | None:
    """What the mean of a loss over classes is divided by, from a batch's labels; None where it is their number.

    torch divides by the weights of the classes at hand, and leaves out labels that are ignored: two batches of equally
    many rows count differently.

    >>> counted = counted_of(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    >>> counted(torch.tensor([0, 1, 1, -100]))
    tensor(7.)
    """
    given, settings = _bare(loss)
    _, taken = _known(given)
    if taken not in (_SOFT, _CLASSES) or settings.get("reduction", getattr(given, "reduction", "mean")) != "mean":
        return None
    weight, ignored = settings.get("weight", getattr(given, "weight", None)), labels_of(loss).ignored

    def counted(label: Tensor) -> Tensor:
        kept = torch.ne(label, ignored if ignored is not None else IGNORED)
        if weight is None:
            return kept.sum().float()
        found: Tensor = weight.to(label.device)[label * kept] * kept
        return found.sum()

    return counted


ANY = Labels()
"""Labels as the data holds them."""
_SOFT = Labels("classes", ignored=IGNORED, soft=True, scores=True)
_CLASSES = Labels("classes", ignored=IGNORED, scores=True)
_MARGIN = Labels("classes", scores=True)
_PADDED = Labels("classes", ignored=-1)
_LOGIT = Labels("numbers", scores=True, share=True)
_NUMBERS = Labels("numbers")
_NAMED: Mapping[str, Labels] = {
    "bce_with_logits": _LOGIT,
    "cross_entropy": _SOFT,
    "l1": _NUMBERS,
    "mse": _NUMBERS,
    "nll": _CLASSES,
    "smooth_l1": _NUMBERS,
    **dict.fromkeys(QUANTILES, _NUMBERS),
}
_MODULES: Mapping[type[nn.Module], Labels] = {
    nn.CrossEntropyLoss: _SOFT,
    nn.NLLLoss: _CLASSES,
    nn.MultiMarginLoss: _MARGIN,
    nn.MultiLabelMarginLoss: _PADDED,
    nn.BCELoss: _NUMBERS,
    nn.BCEWithLogitsLoss: _LOGIT,
    nn.HingeEmbeddingLoss: _NUMBERS,
    nn.HuberLoss: _NUMBERS,
    nn.KLDivLoss: _NUMBERS,
    nn.L1Loss: _NUMBERS,
    nn.MSELoss: _NUMBERS,
    nn.MultiLabelSoftMarginLoss: _NUMBERS,
    nn.PoissonNLLLoss: _NUMBERS,
    nn.SmoothL1Loss: _NUMBERS,
    nn.SoftMarginLoss: _NUMBERS,
}
_FUNCTIONS: tuple[tuple[Callable[..., Any], Labels], ...] = (
    (F.cross_entropy, _SOFT),
    (F.nll_loss, _CLASSES),
    (F.multi_margin_loss, _MARGIN),
    (F.multilabel_margin_loss, _PADDED),
    (F.binary_cross_entropy, _NUMBERS),
    (F.binary_cross_entropy_with_logits, _LOGIT),
    (F.hinge_embedding_loss, _NUMBERS),
    (F.huber_loss, _NUMBERS),
    (F.kl_div, _NUMBERS),
    (F.l1_loss, _NUMBERS),
    (F.mse_loss, _NUMBERS),
    (F.multilabel_soft_margin_loss, _NUMBERS),
    (F.poisson_nll_loss, _NUMBERS),
    (F.smooth_l1_loss, _NUMBERS),
    (F.soft_margin_loss, _NUMBERS),
)


def _known(given: object) -> tuple[str, Labels | None]:
    if isinstance(given, str):
        return given, _NAMED.get(given)
    if isinstance(given, QuantileLoss):
        return repr(given), _NUMBERS
    for kind, taken in _MODULES.items():
        if isinstance(given, kind):
            changed = type(given).forward is not kind.forward  # it may take another output than torch's own does
            return type(given).__name__, replace(taken, scores=taken.scores and not changed)
    for function, taken in _FUNCTIONS:  # by identity: a callable need not be hashable
        if given is function:
            return function.__name__, taken
    return "", None


def _bare(loss: object) -> tuple[object, dict[str, Any]]:
    """A loss without what is around it, and the settings it is called with."""
    settings: dict[str, Any] = {}
    while True:
        if isinstance(loss, functools.partial):
            settings = {**loss.keywords, **settings}
            loss = loss.func
        elif isinstance(owner := getattr(loss, "__self__", None), nn.Module):  # its forward, as a bound method
            loss = owner
        elif isinstance(inner := getattr(loss, "_orig_mod", None), nn.Module):  # compiled
            loss = inner
        else:
            return loss, settings


def _narrowed(label: Tensor) -> Tensor:
    return label.float() if label.dtype == torch.float64 else label
