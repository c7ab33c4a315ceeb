"""When a run is good enough: policies that look at evaluations and decide, without side effects of their own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stops when a metric has not improved for `patience` evaluations.

    Args:
        patience: evaluations without improvement that are allowed.
        metric: which one to watch.
        mode: whether smaller or larger is better; "auto" takes losses and errors as smaller.
        min_delta: what counts as an improvement.
    """

    patience: int = 3
    metric: str = "val_loss"
    mode: Literal["auto", "min", "max"] = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ConfigError(f"EarlyStopping.patience = {self.patience!r} is not possible; use a count of 1 or more")
        if self.mode not in ("auto", "min", "max"):
            raise ConfigError(f"EarlyStopping.mode = {self.mode!r} is not known; use 'auto', 'min' or 'max'")
        if not isinstance(self.min_delta, int | float) or self.min_delta < 0:
            raise ConfigError(f"EarlyStopping.min_delta = {self.min_delta!r} is not possible; use 0 or more")


@dataclass(frozen=True)
class Target:
    """A metric to reach: "val_accuracy >= 0.97"."""

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
            return cls(match[1], match[2].startswith(">"), float(match[3]))
        except ValueError as error:
            raise ConfigError(f"until = {text!r} is not understood: {match[3]!r} is not a number") from error

    def reached(self, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            return False
        found = metrics[self.metric]
        return found >= self.value if self.at_least else found <= self.value


def smaller_is_better(metric: str) -> bool:
    """Whether a metric is one of those that fall as training succeeds.

    >>> smaller_is_better("val_loss"), smaller_is_better("val_accuracy"), smaller_is_better("val_mae")
    (True, False, True)
    """
    return metric.removeprefix("val_") in {"loss", "mae", "mse", "rmse", "error", "perplexity"}


class Verdict:
    """Judges evaluations one by one: is it the best so far, is it enough, has it stopped improving?"""

    def __init__(self, stop: EarlyStopping | None, until: Target | None) -> None:
        self._stop, self._until = stop, until
        self._metric = stop.metric if stop else "val_loss"
        mode = stop.mode if stop else "auto"
        self._sign = -1.0 if mode == "min" or (mode == "auto" and smaller_is_better(self._metric)) else 1.0
        self._min_delta = stop.min_delta if stop else 0.0
        self.best: float | None = None
        self._since_best = 0

    def judge(self, metrics: dict[str, float]) -> tuple[bool, str | None]:
        """Whether this evaluation is the best so far, and why to stop, if at all."""
        if self._stop is not None and self._metric not in metrics:
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
            sign = ">=" if self._until.at_least else "<="
            return better, f"target reached: {self._until.metric} {sign} {self._until.value:g}"
        if self._stop is not None and self._since_best >= self._stop.patience:
            return better, f"{self._metric} has not improved for {self._since_best} evaluations"
        return better, None

    def state(self) -> dict[str, float | int | None]:
        return {"best": self.best, "since_best": self._since_best}

    def load(self, state: dict[str, float | int | None]) -> None:
        self.best = state["best"]
        self._since_best = int(state["since_best"] or 0)
