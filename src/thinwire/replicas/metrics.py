"""Metrics exact over all validation rows of all workers: what is added up apart from what is made of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.replicas.calls import scores
from thinwire.replicas.rankings import MOST_SCORES, OfScores, condensed, f1, of_classes

MOST_SUMS = 8192
"""Numbers that one metric may add up: they travel in a header."""
_MARK = "|"
HOW = (
    "return one number a row (leave out mean()), or give what is added up apart from what is made of it: "
    "tw.MetricOfSums(sums=…, compute=…), or a metric of torchmetrics; tw.MeanOfBatch(…) if it is the mean over the "
    "batch's rows"
)


@dataclass(frozen=True, kw_only=True)
class MetricOfSums:
    """A metric of sums over rows, such as F1: the sums of all batches and workers are added up, then it is computed.

    Args:
        sums: from (output, label) of a batch, numbers or tensors by name, each a sum over the batch's rows.
        compute: from the sums over all rows, as keyword arguments, to one number.
    """

    sums: Callable[[Any, Any], Mapping[str, Any]]
    compute: Callable[..., Any]

    def __post_init__(self) -> None:
        for name, given in (("sums", self.sums), ("compute", self.compute)):
            if not callable(given):
                raise ConfigError(f"MetricOfSums.{name} = {given!r} is not possible; use a function")


@dataclass(frozen=True)
class MeanOfBatch:
    """A metric that gives the mean over a batch's rows as one number: batches count by their rows.

    Args:
        mean: of (output, label).
    """

    mean: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class _Weighted:
    """A metric of sums that takes row weights: the sums are of (output, label, weight)."""

    sums: Callable[[Any, Any, Tensor | None], Mapping[str, Any]]
    compute: Callable[..., Any]


F1 = _Weighted(of_classes, f1)


@dataclass(frozen=True)
class _OfTorch:
    """A metric of torchmetrics whose states are sums."""

    metric: Any

    def sums(self, output: Any, label: Any) -> dict[str, Any]:
        fresh = copy.deepcopy(self.metric).cpu()
        fresh.reset()
        fresh.update(scores(output).cpu(), label.cpu())
        return {name: getattr(fresh, name) for name in fresh._defaults}

    def compute(self, **sums: Tensor) -> Any:
        fresh = copy.deepcopy(self.metric).cpu()
        fresh.reset()
        for name, value in sums.items():
            setattr(fresh, name, value.to(fresh._defaults[name].dtype))
        fresh._update_count = 1
        return fresh.compute()


def metric(name: str, given: Any) -> Any:
    """What a user gives as a metric, in a form that is measured; refuses what cannot be merged over workers."""
    key = f"metrics.{name}"
    if isinstance(given, (MetricOfSums, MeanOfBatch, OfScores, _OfTorch, _Weighted)):
        return given
    if isinstance(given, type) or not callable(given):
        what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise ConfigError(f"{key} = {what} is not possible; use a function of (output, label), or an instance")
    if hasattr(given, "update") and hasattr(given, "compute"):
        reductions = getattr(given, "_reductions", None)
        if not isinstance(reductions, Mapping):
            raise ConfigError(
                f"{key} is a {type(given).__name__}, whose states cannot be added up here; give one metric of "
                "torchmetrics at a time, or tw.MetricOfSums(sums=…, compute=…)"
            )
        other = [state for state, how in reductions.items() if getattr(how, "__name__", "") != "dim_zero_sum"]
        if other:
            raise ConfigError(
                f"{key} is a {type(given).__name__}, whose state {other[0]!r} is no sum over rows, so that workers' "
                "states cannot be added up; give it thresholds where it takes them, or another metric"
            )
        return _OfTorch(given)
    return given


def measure(name: str, given: Any, output: Any, label: Any, weight: Tensor | None, rows: int) -> dict[str, Any]:
    """What a metric comes to on a batch: by key, a total and what it counts; no count where it is a sum to add up.

    Raises:
        ConfigError: it gives one number for the batch, which cannot be merged.
    """
    if isinstance(given, OfScores):
        by_score = given.counts(output, label, weight)
        return {f"{name}{_MARK}{key}": (value, None) for key, value in by_score.items()}
    if isinstance(given, (MetricOfSums, _OfTorch, _Weighted)):
        found = given.sums(output, label, weight) if isinstance(given, _Weighted) else given.sums(output, label)
        if not isinstance(found, Mapping) or not found:
            raise ConfigError(f"metrics.{name}: sums gave {type(found).__name__}; it must give sums by name, as a dict")
        return {key: (value, None) for key, value in _spread(name, found).items()}
    if isinstance(given, MeanOfBatch):
        return {name: (float(given.mean(output, label)) * rows, float(rows))}
    each = torch.as_tensor(given(output, label)).float()
    if each.dim() == 0 or each.shape[0] != rows:
        what = "one number for a batch" if each.dim() == 0 else f"{each.shape[0]} numbers for {rows} rows"
        raise ConfigError(f"metrics.{name} gives {what}, and the mean of batches is not the metric of all rows; {HOW}")
    each = each if each.dim() == 1 else each.flatten(1).mean(1)
    counts = torch.ones_like(each) if weight is None else weight
    return {name: (float((each * counts).sum()), float(counts.sum()))}


def condense(metrics: Mapping[str, Any], sums: dict[str, float], *, whole: bool) -> None:
    """Bounds what metrics of scores add up, as rows are evaluated and when the `whole` of them is."""
    if whole or len(sums) > 4 * MOST_SCORES:
        condensed([f"val_{name}{_MARK}" for name, given in metrics.items() if isinstance(given, OfScores)], sums)


def computed(metrics: Mapping[str, Any], sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of sums, from the sums over all rows of all workers; the others are means, and none of these.

    >>> f1 = MetricOfSums(sums=lambda o, y: {}, compute=lambda tp, wrong: 2 * tp / (2 * tp + wrong))
    >>> computed({"f1": f1}, {"f1|tp||0": 6.0, "f1|wrong||0": 4.0, "accuracy": 3.0})
    {'f1': 0.75}
    """
    states: dict[str, dict[str, dict[int, float]]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    scores: dict[str, dict[str, float]] = {}
    for key, value in sums.items():
        name, _, rest = key.partition(_MARK)
        if rest and isinstance(metrics.get(name), OfScores):
            scores.setdefault(name, {})[rest] = value
        elif rest:
            state, shape, index = rest.split(_MARK)
            states.setdefault(name, {}).setdefault(state, {})[int(index)] = value
            shapes[name, state] = tuple(map(int, filter(None, shape.split("x"))))
    found = {}
    for name, given in metrics.items():
        if name in scores:
            found[name] = given.of(scores[name])
        if name in states:
            tensors = {state: _tensor(values, shapes[name, state]) for state, values in states[name].items()}
            found[name] = _number(name, given, tensors)
    return found


def _tensor(values: Mapping[int, float], shape: tuple[int, ...]) -> Tensor:
    flat = torch.zeros(math.prod(shape), dtype=torch.float64)
    for index, value in values.items():
        flat[index] = value
    return flat.reshape(shape)


def _number(name: str, given: Any, sums: Mapping[str, Tensor]) -> float:
    try:
        return float(given.compute(**sums))
    except ArithmeticError:  # not defined for these rows: none of a class, say
        return math.nan
    except Exception as error:
        shown = {key: value.tolist() for key, value in sums.items()}
        raise ConfigError(
            f"metrics.{name}: compute failed with the sums {str(shown)[:300]}: {type(error).__name__}: {error}; it is "
            "called with the sums by name and gives one number"
        ) from error


def _spread(name: str, sums: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for state, value in sums.items():
        if not isinstance(state, str) or _MARK in state:
            raise ConfigError(f"metrics.{name}: {state!r} cannot name a sum; use a text without {_MARK!r}")
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float64)
        shape = "x".join(map(str, tensor.shape))
        for index, number in enumerate(tensor.flatten().tolist()):
            found[f"{name}{_MARK}{state}{_MARK}{shape}{_MARK}{index}"] = number
    if len(found) > MOST_SUMS:
        raise ConfigError(f"metrics.{name} adds up {len(found)} numbers; at most {MOST_SUMS} are. Add up less.")
    return found
