"""Whether a loss over the rows of a step can be put together from losses over parts of them."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.replicas.objectives import Objective

LEAST = 4
"""Rows of which each half has two."""
MOST_CLASSES = 16
"""Are tried one after the other."""


def refuse_sums(loss: Any, output: Any, label: Tensor | None, together: str) -> None:
    """Refuses a loss that is no mean over rows, where a step is put together from several means.

    torch's own losses say themselves what they divide by: see `thinwire.replicas.labels.counted_of`.

    Args:
        loss: what `fit` was given.
        output: of a few rows.
        label: theirs.
        together: what makes one step of several batches, in words.
    """
    if isinstance(loss, str) or not isinstance(output, Tensor) or label is None or len(output) < LEAST:
        return
    told = ""
    with torch.no_grad(), contextlib.suppress(Exception):  # what fails of other labels is no fault of the loss
        objective, output = Objective(loss), output.detach()
        if _is_sum(objective, output, label):
            told = "sums over rows, so that it grows with them"
        elif not objective.knows_weights and _is_weighted(objective, output, label):
            told = "weighs rows by their labels, and divides by these weights"
    if told:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"loss {name!r} {told}, and {together}, which is the step of one worker with all rows only where the loss "
            "is a mean over rows; return one loss a row (reduction='none') or their mean, give weights of classes to "
            "nn.CrossEntropyLoss(weight=…), or use a strategy whose workers step by themselves, such as tw.SparkNet()"
        )


def _halves(objective: Objective, output: Tensor, label: Tensor) -> tuple[float, float, float]:
    """A loss over some rows, and over their first and second half."""
    half, whole = len(output) // 2, len(output) // 2 * 2
    cuts = (slice(0, whole), slice(0, half), slice(half, whole))
    found = [float(objective.mean(output[cut], label[cut], None)) for cut in cuts]
    return found[0], found[1], found[2]


def _is_sum(objective: Objective, output: Tensor, label: Tensor) -> bool:
    whole, first, second = _halves(objective, output, label)
    return whole != 0 and math.isclose(whole, first + second, rel_tol=1e-4)


def _is_weighted(objective: Objective, output: Tensor, label: Tensor) -> bool:
    """Whether the loss over rows of two classes is nearer to that over one class, as weights of classes have it."""
    if label.dim() != 1 or label.is_floating_point() or output.dim() != 2:
        return False
    half = len(label) // 2
    for kind in range(min(output.shape[1], MOST_CLASSES)):
        other = torch.zeros_like(label)
        other[half:] = kind
        whole, first, second = _halves(objective, output, other)
        least, most = sorted((first, second))
        mixed = not math.isclose(whole, (first + second) / 2, rel_tol=1e-4, abs_tol=1e-6)
        if mixed and least < whole < most:
            return True
    return False
