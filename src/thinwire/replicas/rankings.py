"""Metrics that are no mean over rows, exact over all rows of all workers: AUC, average precision, F1.

AUC and average precision depend on the order of all scores. Workers count positives and negatives by score, and the
counts are added up: that is exact. Where a worker has more than `MOST_SCORES` different scores, their last bits are
dropped until it has no more, and rows whose scores became equal count as ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError

MOST_SCORES = 8192
"""Different scores that one worker reports, positives and negatives apart: they travel in a header."""
_MARK = "|"
_INFINITE = int(np.float32(np.inf).view(np.int32))
Array = np.ndarray[Any, Any]


def area_under_curve(positive: Array, negative: Array) -> float:
    """The share of pairs of a positive and a negative in which the positive has the higher score; ties are a half.

    >>> area_under_curve(np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.0]))
    0.875

    Args:
        positive: weight of the positives by score, lowest first.
        negative: that of the negatives.
    """
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))


def average_precision(positive: Array, negative: Array) -> float:
    """Σ (recall − recall before) · precision, over scores from the highest down.

    >>> average_precision(np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.0]))
    0.8333333333333333

    Args:
        positive: weight of the positives by score, lowest first.
        negative: that of the negatives.
    """
    found, wrong = np.cumsum(positive[::-1]), np.cumsum(negative[::-1])
    return float((positive[::-1] * found / np.maximum(found + wrong, 1e-300)).sum() / positive.sum())


@dataclass(frozen=True)
class OfScores:
    """A metric of the order of scores of two classes.

    Attributes:
        name: for messages.
        compute: from the weights of positives and of negatives by score.
    """

    name: str
    compute: Callable[[Array, Array], float]

    def counts(self, output: Any, label: Tensor, weight: Tensor | None) -> dict[str, float]:
        """By level, class and score, the weight of a batch's rows."""
        score, positive = scores_of(self.name, output, label)
        counted = np.ones(len(score)) if weight is None else weight.detach().cpu().double().numpy()
        known = positive >= 0
        pairs, places = np.unique(_coded(score)[known] * 2 + positive[known], return_inverse=True)
        totals = np.bincount(places, counted[known], len(pairs))
        return {_key(0, pair): total for pair, total in zip(pairs.tolist(), totals.tolist(), strict=True)}

    def of(self, counts: Mapping[str, float]) -> float:
        """The metric of all rows; NaN where one of the classes is not there, or a score is NaN."""
        level, pairs, totals = _read(counts)
        codes = pairs >> 1
        if not len(codes) or (codes > _INFINITE >> level).any() or (codes < (-_INFINITE - 1) >> level).any():
            return math.nan
        scores, places = np.unique(codes, return_inverse=True)
        positive, negative = (
            np.bincount(places, np.where(pairs & 1 == side, totals, 0), len(scores)) for side in (1, 0)
        )
        return self.compute(positive, negative) if positive.sum() > 0 and negative.sum() > 0 else math.nan


AUC = OfScores("auc", area_under_curve)
AVERAGE_PRECISION = OfScores("average_precision", average_precision)


def condensed(prefixes: Iterable[str], sums: dict[str, float], most: int = MOST_SCORES) -> None:
    """Drops last bits of the scores of these metrics, in place, until each has no more than `most` sums."""
    for prefix in prefixes:
        own = {key: value for key, value in sums.items() if key.startswith(prefix)}
        if len(own) <= most:
            continue
        level, pairs, totals = _read({key[len(prefix) :]: value for key, value in own.items()})
        while len(np.unique(pairs)) > most:
            level, pairs = level + 1, _shifted(pairs, 1)
        found, places = np.unique(pairs, return_inverse=True)
        for key in own:
            del sums[key]
        merged = np.bincount(places, totals, len(found)).tolist()
        sums.update({prefix + _key(level, pair): total for pair, total in zip(found.tolist(), merged, strict=True)})


def _key(level: int, pair: int) -> str:
    return f"{level}{_MARK}{pair & 1}{_MARK}{pair >> 1}"


def _read(counts: Mapping[str, float]) -> tuple[int, Array, Array]:
    """All counts at the coarsest level that is among them: score and class as one number each, and their weights."""
    parts = [tuple(map(int, key.split(_MARK))) for key in counts]
    level = max((part[0] for part in parts), default=0)
    pairs = [(code >> (level - at)) * 2 + side for at, side, code in parts]
    return level, np.array(pairs, np.int64), np.fromiter(counts.values(), float, len(parts))


def _shifted(pairs: Array, bits: int) -> Array:
    return np.asarray(((pairs >> 1 >> bits) << 1) | (pairs & 1))


def _coded(score: Array) -> Array:
    """Scores as whole numbers in the same order: the bits of float32, negative ones turned round.

    >>> _coded(np.array([-1.0, -0.5, -0.0, 0.0, 2.0], np.float32)).tolist()
    [-1065353217, -1056964609, 0, 0, 1073741824]
    """
    bits = (score + np.float32(0)).view(np.int32).astype(np.int64)
    return np.asarray(np.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def scores_of(name: str, output: Any, label: Tensor) -> tuple[Array, Array]:
    """The score of a row's being positive, and 1 where it is, 0 where not, -1 where its label counts for nothing."""
    rows, _ = _rows_of(name, output)
    if rows.shape[1] > 2:
        raise ConfigError(
            f"metrics: {name!r} is of two classes, and the model has {rows.shape[1]} outputs; use 'f1' or 'accuracy', "
            "or tw.MetricOfSums of your own"
        )
    score = rows[:, 0] if rows.shape[1] == 1 else rows[:, 1] - rows[:, 0]
    truth = _classes(name, label, rows)
    return score.numpy(), truth.numpy()


def of_classes(output: Any, label: Tensor, weight: Tensor | None) -> dict[str, Tensor]:
    """By class, weights of rows that are rightly in it, wrongly in it, and wrongly not in it."""
    rows, count = _rows_of("f1", output)
    found = (rows[:, 0] > 0).long() if rows.shape[1] == 1 else rows.argmax(1)
    truth = _classes("f1", label, rows)
    known = truth >= 0
    counted = torch.ones(len(rows), dtype=torch.float64) if weight is None else weight.detach().cpu().double()
    found, truth, counted = found[known], truth[known], counted[known]
    right = counted * (found == truth)

    def by(classes: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64).index_add_(0, classes, weights)

    return {"right": by(truth, right), "found": by(found, counted), "there": by(truth, counted)}


def f1(right: Tensor, found: Tensor, there: Tensor) -> float:
    """2·right ÷ (found + there): of class 1 of two, else the mean over the classes that are there or were found.

    >>> f1(torch.tensor([5.0, 3.0]), torch.tensor([6.0, 4.0]), torch.tensor([6.0, 4.0]))
    0.75
    """
    of_each = 2 * right / (found + there).clamp_min(1e-300)
    if len(right) == 2:
        return float(of_each[1])
    seen = (found + there) > 0
    return float(of_each[seen].mean()) if seen.any() else math.nan


def _rows_of(name: str, output: Any) -> tuple[Tensor, int]:
    """The output as rows × classes, and how many classes there are."""
    if not isinstance(output, Tensor) or output.dim() > 2:
        shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"metrics: {name!r} takes one output a row, or one for each class, and is given {shape}; use "
            "tw.MetricOfSums of your own"
        )
    rows = output.detach().float().cpu().reshape(len(output), -1)
    return rows, max(2, rows.shape[1])


def _classes(name: str, label: Tensor, rows: Tensor) -> Tensor:
    label = label.detach().cpu()
    if label.dim() == 2 and label.shape == rows.shape and rows.shape[1] > 1:
        return label.argmax(1)
    if label.numel() != len(rows):
        raise ConfigError(
            f"metrics: {name!r} takes one label a row, and is given labels in the shape {tuple(label.shape[1:])}"
        )
    label = label.reshape(-1)
    if rows.shape[1] == 1 and label.is_floating_point():
        return (label > 0.5).long()
    return label.long()
