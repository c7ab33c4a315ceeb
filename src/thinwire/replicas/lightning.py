"""LightningModules as they are: `training_step` gives the loss, `configure_optimizers` what steps.

Lightning is not imported: its modules are told by the names of their classes. No trainer drives them, so that hooks
other than these, and `validation_step`, are not called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.replicas.algorithms import Algorithm, Memory
from thinwire.replicas.calls import called_under, unwrapped
from thinwire.replicas.objectives import Objective

_HOMES = ("lightning", "pytorch_lightning")
HELD = "_configured_scheduler"
"""Where an optimizer keeps the scheduler that was configured with it until the replica asks for it."""


def is_at_hand() -> bool:
    """Whether this process has imported Lightning, so that a function may make such modules."""
    return any(home in sys.modules for home in _HOMES)


def is_lightning(given: object) -> bool:
    """Whether this is a LightningModule, or a class of such."""
    kind = given if isinstance(given, type) else type(given)
    names = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return any(home in _HOMES and name == "LightningModule" for home, name in names)


class Columns(tuple[Any, ...]):
    """A batch as a step is given it: the inputs and the label in order, or by the names of their columns."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, batch: Any) -> Columns:
        """A batch's tensors; the label is the last."""
        label = () if batch.label is None else (batch.label,)
        made = cls((*batch.inputs, *label))
        made.names = (*getattr(batch, "names", ()), "label")
        return made

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names[: len(self)]:
            raise KeyError(f"{key!r}; the batch has {', '.join(self.names[: len(self)])}")
        return super().__getitem__(self.names.index(key))


class Configured(NamedTuple):
    """What `configure_optimizers` gave."""

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    every: Literal["step", "epoch"] = "epoch"


def configured(module: Any) -> Configured:
    """What a module steps with.

    Raises:
        ConfigError: It is not one optimizer, with one scheduler at most.
    """
    given: Any = module.configure_optimizers() or ()
    if isinstance(given, Mapping):
        given = given.get("optimizer"), given.get("lr_scheduler")
    elif isinstance(given, torch.optim.Optimizer):
        given = given, None
    optimizers, schedulers = given if isinstance(given, Sequence) and len(given) == 2 else (given, None)
    if isinstance(schedulers, torch.optim.Optimizer):
        optimizers, schedulers = given, None
    optimizer: Any = _single(optimizers, "optimizers")
    scheduler: Any = _single(schedulers, "schedulers")
    if isinstance(optimizer, Mapping):
        scheduler, optimizer = optimizer.get("lr_scheduler"), optimizer.get("optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"configure_optimizers of {type(module).__name__} gives {type(optimizer).__name__}; it must give one torch "
            "optimizer, or a dict with 'optimizer' and 'lr_scheduler'"
        )
    if not isinstance(scheduler, Mapping):
        return Configured(optimizer, scheduler)
    every, frequency = scheduler.get("interval", "epoch"), scheduler.get("frequency", 1)
    if every not in ("step", "epoch") or frequency != 1:
        raise ConfigError(
            f"lr_scheduler has interval={every!r} and frequency={frequency!r}; use 'step' or 'epoch', and frequency=1"
        )
    return Configured(optimizer, scheduler.get("scheduler"), every)


def _single(given: Any, what: str) -> Any:
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) > 1:
        raise ConfigError(
            f"configure_optimizers gives {len(given)} {what}; workers step one: give one with several parameter groups"
        )
    return given[0] if given else None


class OwnOptimizer:
    """Makes the optimizer that a module configures itself."""

    on_workers_only = True

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        raise ConfigError(
            "configure_optimizers makes its optimizer of a whole module; use a strategy that steps it whole"
        )

    def of_module(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a module, which keeps its scheduler."""
        found = configured(unwrapped(module))
        vars(found.optimizer)[HELD] = found.scheduler
        return found.optimizer

    def __repr__(self) -> str:
        return "configure_optimizers"


def own_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that was configured with an optimizer; None where there is none."""
    return vars(optimizer).pop(HELD, None)


class _Step(nn.Module):
    """A step of a module as a forward pass, so that its parameters can be others for it."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self._orig_mod, self._step = module, step

    def forward(self, batch: Columns, number: int) -> Any:
        return self._step(batch, number)


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Algorithm):
    """The gradient of what a LightningModule's `training_step` returns; evaluations are its `validation_step`."""

    name = "training_step"

    def loss(self, module: nn.Module, batch: Any, objective: Objective, memory: Memory) -> tuple[Tensor, Tensor]:
        given = unwrapped(module)
        if not is_lightning(given):
            raise ConfigError(
                f"{type(given).__name__} has no training_step to take a loss of; give a LightningModule, or leave "
                "algorithm out"
            )
        if not getattr(given, "automatic_optimization", True):
            raise ConfigError(
                f"{type(given).__name__} sets automatic_optimization = False, and steps its optimizers itself; workers "
                "step them: return the loss from training_step"
            )
        with _logged(given):
            found = _loss_of(_called(given.training_step, Columns.of(batch), int(memory["steps"])))
        if found is None:
            raise ConfigError(
                f"training_step of {type(given).__name__} gives no loss; return a tensor, or a dict with 'loss'"
            )
        return found, found

    def evaluate(self, module: nn.Module, values: Mapping[str, Tensor], batch: Any) -> dict[str, tuple[float, float]]:
        """Sums and counts of what `validation_step` logs of a batch, under other parameters and buffers."""
        given: Any = unwrapped(module)
        own = type(given).validation_step.__module__.partition(".")[0] not in _HOMES
        step = given.validation_step if own else given.training_step
        within = _Step(given, lambda batch, number: _called(step, batch, number))
        with _logged(given) as logged:
            named = {f"_orig_mod.{name}": value for name, value in values.items()}
            found = _loss_of(called_under(within, named, (Columns.of(batch), 0)))
        told = (
            {name if name.startswith("val_") else f"val_{name}": value for name, value in logged.items()} if own else {}
        )
        if found is not None:
            told.setdefault("val_loss", found)
        rows = float(batch.num_rows)
        return {name: (float(value) * rows, rows) for name, value in told.items()}


def _called(step: Callable[..., Any], batch: Columns, number: int) -> Any:
    """A step, which may or may not take the batch's number."""
    return step(batch, number) if len(inspect.signature(step).parameters) > 1 else step(batch)


def _loss_of(given: Any) -> Tensor | None:
    found = given.get("loss") if isinstance(given, Mapping) else given
    return found if isinstance(found, Tensor) else None


@contextmanager
def _logged(module: Any) -> Iterator[dict[str, Any]]:
    """What a module logs meanwhile, by name; without a trainer it would warn instead."""
    told: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor) or value.numel() == 1:
            told[name] = value

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value)

    vars(module).update(log=log, log_dict=log_dict)
    try:
        yield told
    finally:
        vars(module).pop("log")
        vars(module).pop("log_dict")
