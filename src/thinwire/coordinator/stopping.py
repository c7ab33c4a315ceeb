"""When a run is good enough: policies that decide from evaluations, without side effects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from thinwire.errors import ConfigError, nearest
from thinwire.values import check_fields, choice, number, text, whole


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stops when a metric has not improved for `patience` evaluations.

    Args:
        patience: evaluations without improvement that are allowed.
        metric: the metric to watch: "val_loss", "val_" and a metric's name, or "train_loss" at the time of evaluations.
        mode: whether smaller or larger values are better; "auto" takes smaller ones for losses and errors.
        min_delta: least change that counts as an improvement.
    """

    patience: int = 3
    metric: str = "val_loss"
    mode: Literal["auto", "min", "max"] = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            "EarlyStopping",
            patience=whole(1),
            metric=text("'val_loss'"),
            mode=choice("auto", "min", "max"),
            min_delta=number(least=0),
        )


TRAIN_LOSS = "train_loss"
"""The loss on training rows over each worker's last epoch. Checked when epochs end; needs no validation rows."""
_ALIASES = {"loss": TRAIN_LOSS}


@dataclass(frozen=True)
class Target:
    """A metric to reach: "val_accuracy >= 0.97", or "train_loss <= 0.1"."""

    metric: str
    at_least: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads a target.

        >>> Target.parse("val_accuracy >= 0.97")
        Target(metric='val_accuracy', at_least=True, value=0.97)
        """
        match = re.fullmatch(r"\s*(\w+)\s*([<>]=?)\s*([-+.\deE]+)\s*", text)
        if match is None:
            raise ConfigError(f'until = {text!r} is not understood; write it as "val_accuracy >= 0.97"')
        try:
            return cls(_ALIASES.get(match[1], match[1]), match[2].startswith(">"), float(match[3]))
        except ValueError as error:
            raise ConfigError(f"until = {text!r} is not understood: {match[3]!r} is not a number") from error

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.value:g}"

    def reached(self, metrics: Mapping[str, Any]) -> bool:
        found: float | None = metrics.get(self.metric)
        if found is None:
            return False
        return found >= self.value if self.at_least else found <= self.value


def refuse_unmeasured(key: str, metric: str, measured: Iterable[str], *, validated: bool) -> None:
    """Refuses a metric that a run does not measure: waiting for the metric would have no effect.

    Args:
        key: the setting that names the metric.
        metric: name of the metric.
        measured: names of the metrics that evaluations measure.
        validated: whether the run has validation rows.
    """
    if metric == TRAIN_LOSS:
        return
    if metric not in measured:
        raise ConfigError(
            f"{key} names {metric!r}, which this run does not measure. {nearest(metric, [*measured, TRAIN_LOSS])} "
            "A metric is measured if metrics=[…] names it."
        )
    if not validated:
        raise ConfigError(
            f"{key} needs {metric!r} on validation rows, and the run has none; give validation=0.1, or other rows"
        )


_SMALLER = {"error", "mae", "mape", "mse", "perplexity", "rmse", "rmsle", "smape"}


def smaller_is_better(metric: str) -> bool:
    """Whether a metric is one that falls as training succeeds.

    >>> smaller_is_better("val_loss"), smaller_is_better("val_auc"), smaller_is_better("val_quantile_90")
    (True, False, True)
    """
    name = metric.removeprefix("val_").removeprefix("train_")
    return name in _SMALLER or name.startswith("quantile") or name.endswith(("loss", "_error"))


class Verdict:
    """Judges evaluations one by one: whether each is the best so far, reaches the target, or ends the patience."""

    def __init__(self, stop: EarlyStopping | None, until: Target | None) -> None:
        self._stop, self._until = stop, until
        self._metric = stop.metric if stop else "val_loss"
        mode = stop.mode if stop else "auto"
        self._sign = -1.0 if mode == "min" or (mode == "auto" and smaller_is_better(self._metric)) else 1.0
        self._min_delta = stop.min_delta if stop else 0.0
        self.best: float | None = None
        self._since_best = 0
        self.best_at: int | None = None
        """The number of the best evaluation."""
        self.best_metrics: dict[str, float] = {}

    def note(self, number: int, metrics: dict[str, float]) -> None:
        """Notes the best evaluation so far."""
        self.best_at, self.best_metrics = number, dict(metrics)

    def judge(self, metrics: dict[str, float]) -> tuple[bool, str | None]:
        """Whether this evaluation is the best so far, and the reason to stop; None where the run goes on."""
        if self._stop is not None and self._metric not in metrics and self._metric != TRAIN_LOSS:
            raise ConfigError(
                f"EarlyStopping.metric = {self._metric!r} is not measured; measured are {sorted(metrics)}"
            )
        value = metrics.get(self._metric)
        better = (
            value is not None
            and math.isfinite(value)
            and (self.best is None or self._sign * (value - self.best) > self._min_delta)
        )
        if better:
            self.best, self._since_best = value, 0
        else:
            self._since_best += 1
        if self._until is not None and self._until.reached(metrics):
            return better, f"target reached: {self._until}"
        if self._stop is not None and self._since_best >= self._stop.patience:
            return better, f"{self._metric} has not improved for {self._since_best} evaluations"
        return better, None

    @property
    def waits(self) -> str | None:
        """The setting that waits for a metric of validation rows, in words; None where none does."""
        if self._stop is not None:
            return f"stop (metric {self._metric!r})"
        return f"until ({self._until})" if self._until is not None and self._until.metric != TRAIN_LOSS else None

    def state(self) -> dict[str, Any]:
        kept = {"best": self.best, "since_best": self._since_best}
        return kept | {"best_at": self.best_at, "best_metrics": self.best_metrics}

    def load(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self._since_best = int(state["since_best"] or 0)
        self.best_at, self.best_metrics = state.get("best_at"), dict(state.get("best_metrics") or {})
