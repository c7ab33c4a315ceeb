"""Losses, metrics and optimizers by name; evaluated row by row, so that weights and short batches are exact."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor
from torch.optim import lr_scheduler

from thinwire.errors import ConfigError, DataError, nearest
from thinwire.replicas.calls import own_loss, scores
from thinwire.replicas.labels import counted_of, labels_of
from thinwire.replicas.metrics import F1, metric
from thinwire.replicas.quantiles import QUANTILES
from thinwire.replicas.rankings import AUC, AVERAGE_PRECISION
from thinwire.replicas.searches import ConjugateGradient

Loss = Callable[..., Tensor]
Metric = Any
"""A function of (output, label) that gives one number a row, or one of `thinwire.replicas.metrics`."""
OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


def _rows(values: Any) -> Tensor:
    """One number a row."""
    found: Tensor = values if values.dim() <= 1 else values.flatten(1).mean(1)
    return found


def _like(output: Tensor, label: Tensor) -> Tensor:
    """The label in the output's shape and type: (rows,) and (rows, 1) are meant to be the same."""
    return label.to(output.dtype).reshape(output.shape) if output.numel() == label.numel() else label


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda o, y: _rows(F.cross_entropy(o, y, reduction="none")),
    "nll": lambda o, y: _rows(F.nll_loss(o, y, reduction="none")),
    "mse": lambda o, y: _rows(F.mse_loss(o, _like(o, y), reduction="none")),
    "l1": lambda o, y: _rows(F.l1_loss(o, _like(o, y), reduction="none")),
    "smooth_l1": lambda o, y: _rows(F.smooth_l1_loss(o, _like(o, y), reduction="none")),
    "bce_with_logits": lambda o, y: _rows(F.binary_cross_entropy_with_logits(o, _like(o, y), reduction="none")),
    **QUANTILES,
}

OWN = "own"
"""The name of the loss that the network itself computes, of labels that are among its inputs."""


def _mean_of(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, label: Tensor) -> Tensor:
    return loss(output, label).mean()


_WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": lambda o, y: F.mse_loss(o, _like(o, y)),
    "l1": lambda o, y: F.l1_loss(o, _like(o, y)),
    "smooth_l1": lambda o, y: F.smooth_l1_loss(o, _like(o, y)),
    "bce_with_logits": lambda o, y: F.binary_cross_entropy_with_logits(o, _like(o, y)),
    **{name: functools.partial(_mean_of, loss) for name, loss in QUANTILES.items()},
}
"""The same means by torch's own fused reductions, so that training equals plain PyTorch bit for bit."""


def accuracy(output: Any, label: Tensor) -> Tensor:
    """1 where the largest output (or the sign of a single one) is the label, else 0; one number a row.

    A label of a probability for each class stands for the likeliest.
    """
    output = scores(output)
    if output.dim() > 1 and output.shape[1] > 1:
        if label.shape == output.shape:
            label = label.argmax(1)
        return _rows((output.argmax(1) == label).float())
    found: Tensor = ((output.reshape(label.shape) > 0) == (label > 0.5)).float()
    return found


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "auc": AUC,
    "average_precision": AVERAGE_PRECISION,
    "f1": F1,
    "mae": lambda o, y: _rows((scores(o) - _like(scores(o), y)).abs()),
    "mse": lambda o, y: _rows((scores(o) - _like(scores(o), y)).square()),
    **QUANTILES,
}

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "conjugate_gradient": ConjugateGradient,
    "lbfgs": torch.optim.LBFGS,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class Objective:
    """A loss by name or as a callable of (output, label), as one number for training and one a row for evaluation."""

    def __init__(self, loss: str | Loss) -> None:
        if isinstance(loss, str) and loss not in (*LOSSES, OWN):
            raise ConfigError(f"train.loss = {loss!r} is not known. {nearest(loss, (*LOSSES, OWN))}")
        self._loss = loss
        self._labels = labels_of(loss)
        self._of_scores = isinstance(loss, str) or self._labels.kind != "any"
        self._counted = counted_of(loss)

    @property
    def knows_weights(self) -> bool:
        """Whether `weight_of` is what the loss divides by; one that is not torch's own over classes does not say."""
        return self._counted is not None

    def weight_of(self, label: Tensor | None, weight: Tensor | None, num_rows: int) -> float:
        """What a batch's mean loss counts by beside the means of other batches.

        It is the rows, their weights, or what a loss over classes divides by, in rows: its weights of the classes at
        hand, and positions whose label is not ignored.
        """
        if weight is not None:
            return float(weight.sum())
        if self._counted is None or label is None or not label.numel() or label.is_floating_point():
            return float(num_rows)
        return float(self._counted(label)) * num_rows / label.numel()

    def mean(self, output: Any, label: Tensor | None, weight: Tensor | None) -> Tensor:
        """The batch's loss; with weights, Σ w·l / Σ w."""
        if weight is not None:
            rows = self.rows(output, label)
            return (rows * weight).sum() / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)
        found = self._called(_WHOLE, output, label)
        return found if isinstance(self._loss, str) or found.dim() == 0 else found.mean()

    def rows(self, output: Any, label: Tensor | None) -> Tensor:
        """One loss a row."""
        found = self._called(LOSSES, output, label)
        if isinstance(self._loss, str) and self._loss != OWN:
            return found
        if found.dim() == 0:
            raise DataError(
                "the loss gives one number for a batch, and sample weights need one a row; "
                "return a vector of losses (reduction='none')"
            )
        return _rows(found)

    def _called(self, named: Mapping[str, Any], output: Any, label: Tensor | None) -> Tensor:
        """What the loss gives; a label of more classes than there are outputs is told of, where torch refuses it."""
        if self._loss == OWN:
            return _own(output)
        loss = named[self._loss] if isinstance(self._loss, str) else self._loss
        output = scores(output) if self._of_scores else output
        try:
            found: Tensor = loss(output) if label is None else loss(output, label)
            if not isinstance(found, Tensor):
                raise ConfigError(
                    f"the loss gives a {type(found).__name__}; it must give a tensor, which gradients are taken of: "
                    "leave item(), float() and numpy() out of it"
                )
            return found
        except (IndexError, RuntimeError):
            if label is not None and isinstance(output, Tensor):
                with contextlib.suppress(RuntimeError):  # a tensor under vmap has no values to show
                    self._labels.measured(tuple(output.shape[1:])).refuse_wrong(
                        "the label column, in one batch,", label
                    )
            raise

    def total(self, output: Any, label: Tensor | None, weight: Tensor | None, num_rows: int) -> tuple[float, float]:
        """Summed loss and summed weight of a batch, for evaluation."""
        if weight is not None:
            rows = self.rows(output, label)
            return float((rows * weight).sum()), float(weight.sum())
        counted = self.weight_of(label, None, num_rows)
        return (float(self.mean(output, label, None)) * counted if counted else 0.0), counted


def _own(output: Any) -> Tensor:
    found = own_loss(output)
    if found is None:
        raise ConfigError(
            f"loss = {OWN!r} takes the loss that the network itself computes, and its output, of the type "
            f"{type(output).__name__}, has none; give the labels among the inputs (inputs=[…, 'labels']), or a loss of "
            "(output, label), or with label=None of the output alone"
        )
    return found


def metrics_of(names: Iterable[str] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics by name; a mapping brings its own: see `thinwire.replicas.metrics`."""
    if isinstance(names, Mapping):
        for name in names:
            if not isinstance(name, str) or not name or "|" in name:
                raise ConfigError(f"metrics = {{{name!r}: …}}: {name!r} is no name; use a text without '|'")
            if name == "loss":
                raise ConfigError(
                    "metrics = {'loss': …} would stand in the place of the loss, val_loss; give another name"
                )
        own = {name: given for name, given in names.items() if not isinstance(given, str)}
        known = {name: _metric_by_name(given) for name, given in names.items() if isinstance(given, str)}
        return {name: known[name] if name in known else metric(name, own[name]) for name in names}
    return {name: _metric_by_name(name) for name in names}


def _metric_by_name(name: str) -> Metric:
    if name not in METRICS:
        raise ConfigError(f"metric {name!r} is not known. {nearest(name, METRICS)}")
    return METRICS[name]


class NamedOptimizer:
    """An optimizer by name with its settings, as a recipe gives it; picklable, unlike a lambda."""

    def __init__(self, name: str, **settings: Any) -> None:
        if name not in OPTIMIZERS:
            raise ConfigError(f"train.optimizer.name = {name!r} is not known. {nearest(name, OPTIMIZERS)}")
        self.name, self.settings = name, settings

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = OPTIMIZERS[self.name](parameters, **self.settings)
            return made
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(f"train.optimizer {self.name!r} does not take {self.settings}: {error}") from error

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"


SCHEDULERS = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "exponential": lr_scheduler.ExponentialLR,
    "multistep": lr_scheduler.MultiStepLR,
    "onecycle": lr_scheduler.OneCycleLR,
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "step": lr_scheduler.StepLR,
}


RISING = {"onecycle": "it rises by itself, for pct_start of its time", "plateau": "it follows evaluations"}
"""Schedulers that take no warm-up, and why."""


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1


def _of_the_run(value: Any, length: int) -> Any:
    """A length, where it is a share of the run."""
    return round(value * length) if _is_share(value) else value


class EndingCosine(lr_scheduler.CosineAnnealingLR):
    """A cosine that stays where it ends; torch's own would rise again."""

    def get_lr(self) -> Any:
        if self.last_epoch > self.T_max:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


LENGTHS = {"cosine": "T_max", "multistep": "milestones", "onecycle": "total_steps", "step": "step_size"}
"""By scheduler, the setting that is a length, or several: a fraction is a share of the run."""


class NamedScheduler:
    """A learning-rate scheduler by name with its settings, as a recipe gives it.

    Args:
        name: one of `SCHEDULERS`.
        warmup: steps or epochs, as the scheduler moves, in which the rate rises evenly to what the optimizer has; the
            schedule begins after them. A fraction below 1 is a share of the run.
        every: whether it moves after each "step" or each "epoch"; None leaves it to the run.
        settings: torch's own; a length may be a share of the run, as a fraction above 0 and up to 1.0.
    """

    def __init__(self, name: str, *, warmup: float = 0, every: str | None = None, **settings: Any) -> None:
        if name not in SCHEDULERS:
            raise ConfigError(f"train.scheduler.name = {name!r} is not known. {nearest(name, SCHEDULERS)}")
        if not (_is_share(warmup) and warmup < 1) and (type(warmup) is not int or warmup < 0):
            raise ConfigError(
                f"train.scheduler.warmup = {warmup!r} is not possible; use a whole number of 0 or more, or a share of "
                "the run below 1"
            )
        if warmup and name in RISING:
            raise ConfigError(f"train.scheduler {name!r} takes no warmup: {RISING[name]}; leave it out")
        if every not in (None, "step", "epoch"):
            raise ConfigError(f"train.scheduler.every = {every!r} is not known; use 'step' or 'epoch'")
        self.name, self.warmup, self.every, self.settings = name, warmup, every, settings
        self._kind: Any = SCHEDULERS[name]

    @property
    def _length(self) -> Any:
        return self.settings.get(LENGTHS.get(self.name, ""))

    def moving(self, every: str) -> NamedScheduler:
        """The same, moving after each step or epoch."""
        return NamedScheduler(self.name, warmup=self.warmup, every=every, **self.settings)

    def over(self, length: int | None) -> NamedScheduler:
        """The same for a run of so many steps or epochs: shares become lengths, and a cosine without one ends with it.

        Raises:
            ConfigError: A length is a share of the run, and how long that is is not known.
        """
        given = [*(self._length if isinstance(self._length, list | tuple) else [self._length]), self.warmup]
        key = LENGTHS.get(self.name, "")
        if not isinstance(self._length, list | tuple | None) and self._length <= 0:
            raise ConfigError(
                f"train.scheduler.{key} = {self._length!r} is not possible; use a whole number of 1 or more, or a "
                "share of the run up to 1.0"
            )
        if self.name == "onecycle" and length is not None and isinstance(self._length, int) and self._length < length:
            raise ConfigError(
                f"train.scheduler.total_steps = {self._length} is less than the {length} {self.every}s of the run, and "
                "torch's one cycle moves no further; use total_steps = 1.0, which is the whole run"
            )
        if length is None:
            if any(map(_is_share, given)):
                raise ConfigError(
                    f"train.scheduler {self.name!r} has lengths that are shares of the run, and how many "
                    f"{'steps' if self.every == 'step' else 'epochs'} it has is not said; give whole numbers, or "
                    f"{'steps' if self.every == 'step' else 'epochs'} to the run"
                )
            return self
        warmup = _of_the_run(self.warmup, length)
        settings, ends = dict(self.settings), self.name == "cosine" and key not in self.settings
        if ends:
            settings[key] = max(1, length - warmup)
        elif key in settings:
            held = settings[key]
            many = isinstance(held, list | tuple)
            passed = 0 if key == "step_size" else warmup  # by when the schedule itself begins
            found = [
                max(0, _of_the_run(each, length) - passed) if _is_share(each) else each
                for each in (held if many else [held])
            ]
            settings[key] = found if many else max(1, found[0])
        made = NamedScheduler(self.name, warmup=warmup, every=self.every, **settings)
        made._kind = EndingCosine if ends or (self.name == "cosine" and _is_share(self._length)) else made._kind
        return made

    def unsettled(self, length: int | None) -> str:
        """What of it a run of so many steps or epochs ends before, in words; empty where it fits."""
        if length is None or self._length is None:
            return ""
        last = max(self._length) if isinstance(self._length, list | tuple) else self._length
        if not isinstance(last, int) or self.warmup + last <= length:
            return ""
        after = f" after a warm-up of {self.warmup}" if self.warmup else ""
        key = LENGTHS[self.name]
        return (
            f"the run of {length} {self.every or 'epoch'}s ends before its schedule: train.scheduler.{key} = "
            f"{self._length}{after}. Train longer, or give a share of the run: {key} = "
            + ("[0.5, 0.75]" if key == "milestones" else "0.5")
        )

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        rise, rising = None, int(self.warmup)
        if rising:
            rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / (rising + 1), total_iters=rising)
        try:
            made = self._kind(optimizer, **self.settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"train.scheduler {self.name!r} does not take {self.settings}: {error}") from error
        return lr_scheduler.SequentialLR(optimizer, [rise, made], [rising]) if rise else made
