"""What `fit` was asked for, looked at before anything starts."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.cluster.base import Site
from thinwire.coordinator.stopping import TRAIN_LOSS, EarlyStopping, Target, refuse_unmeasured
from thinwire.data.feeds import Wanted
from thinwire.errors import ConfigError, DataError
from thinwire.models import ZOO
from thinwire.models.boltzmann import free_energy_gap, reconstruction_error
from thinwire.placement import Layered, Pipeline, Placement, Whole
from thinwire.replicas import Algorithm, BackPropagation, ContrastiveDivergence, TrainSpec
from thinwire.replicas.calls import takes_names
from thinwire.replicas.labels import labels_of
from thinwire.replicas.lightning import OwnOptimizer, TrainingStep, configured, is_at_hand, is_lightning, own_scheduler
from thinwire.replicas.objectives import OWN, Metric, NamedOptimizer, NamedScheduler
from thinwire.replicas.torch import build_module
from thinwire.rules.finite import is_finite
from thinwire.rules.placement import Wire
from thinwire.run.arguments import RATE
from thinwire.run.trial import Trial
from thinwire.strategies import MPCA, Measured, Served, Strategy, name_of

_log = logging.getLogger("thinwire.run")
SHARES = ("accuracy", "auc", "average_precision", "f1")
"""Metrics from 0 to 1."""

USUAL = Wire()
"""The link that plans count with where nothing is said of it."""


def carrier_for(asked: str, strategy: Strategy, where: Site) -> str:
    """The exchange that carries a strategy; refuses one that cannot."""
    name, late = name_of(strategy), strategy.timing == "async"
    if late and not isinstance(strategy, Served):
        raise ConfigError(f"{name} has timing 'async' and is no Served: derive it from thinwire.strategies.Served")
    if late and asked in ("mesh", "spark"):
        raise ConfigError(
            f"exchange = {asked!r} cannot carry {name}: its rounds are of all workers, and {name} has each worker meet "
            "the joint model alone; use exchange='table'"
        )
    if asked == "table" and not late:
        raise ConfigError(f"exchange = 'table' cannot carry {name}: its rounds are of all workers; use exchange='mesh'")
    if asked == "spark":
        where.needs_jobs()
        if strategy.quorum < 1.0:
            raise ConfigError(
                f"exchange = 'spark' cannot carry {name} with quorum={strategy.quorum}: Spark sums what all workers "
                "gave; use quorum=1, or exchange='mesh'"
            )
    return ("table" if late else "mesh") if asked == "auto" else asked


def placement_for(given: Placement | None, strategy: Strategy, carrier: str, where: Site) -> Placement:
    """How replicas span workers; refuses what cannot be."""
    placement = Whole() if given is None else given
    if not placement.shares or (placement.group_size == "auto" and where.workers == 1):
        return Whole()
    if placement.group_size != "auto":
        size = placement.size
        if where.workers % size:
            raise ConfigError(f"group_size = {size} does not divide {where.workers} workers; use one of its divisors")
        if isinstance(placement, Layered):
            placement = placement.settled(size, USUAL)
    if carrier == "spark":
        raise ConfigError(
            "placement needs workers that reach each other by ports; exchange='spark' is for those that do not"
        )
    if where.crew is None:
        raise ConfigError("placement needs a process for each worker; use tw.Local(workers=4) or tw.Spark(workers=4)")
    if where.in_process and isinstance(placement, Pipeline):
        raise ConfigError("a pipeline cannot be simulated; use tw.Planned or tw.TensorParallel in its place")
    if strategy.helpers:
        raise ConfigError("servers='driver' serves whole replicas; with a placement use servers='spread', or a number")
    return placement


def why_dense(strategy: Strategy, placement: Placement) -> str | None:
    """What makes the gradients of embeddings dense, in words; None where workers step along their own."""
    if strategy.subject == "gradients":
        return f"{name_of(strategy)} exchanges dense gradients"
    if placement.shares:
        return f"{placement!r} spreads the model over workers"
    return "MPCA adds a pull to every gradient" if isinstance(strategy, MPCA) else None


def metrics_for(given: Sequence[str] | Mapping[str, Metric] | None, loss: object) -> Any:
    """What is measured; accuracy where the loss is one of classes."""
    if given is None:
        return ("accuracy",) if labels_of(loss).scores else ()
    return given


def objective_for(algorithm: Algorithm | None, loss: Any, metrics: Any, *, own: bool = False) -> tuple[Any, Any]:
    """The loss and metrics that are meant; an algorithm without labels brings its own.

    Args:
        algorithm: how a gradient is found.
        loss: what `fit` was given.
        metrics: what `fit` was given.
        own: whether the network's own loss is meant where none is given.
    """
    if isinstance(algorithm, ContrastiveDivergence) and loss is None:
        gap = {"free_energy_gap": free_energy_gap} if metrics is None else metrics
        return reconstruction_error, gap
    return (OWN if own else "cross_entropy") if loss is None else loss, metrics


class Stepping(NamedTuple):
    """How a run's replicas step."""

    algorithm: Algorithm | None
    optimizer: Any
    scheduler: Any
    every: Any


def stepping_for(model: Any, asked: Stepping, *, seed: int, weight: str | None, compiled: bool) -> Stepping:
    """How replicas step: where the network is a LightningModule, and nothing else is asked for, as it says itself.

    Args:
        model: the network, its class, or what makes it.
        asked: what `fit` was given; no algorithm means the network's own.
        seed: under which it is made.
        weight: the column of row weights.
        compiled: whether forward passes are to be compiled.
    """
    made = model
    if asked.algorithm is None and not isinstance(model, nn.Module) and model not in ZOO.values() and is_at_hand():
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # which workers will tell
            made = build_module(model, seed)
    given = asked.algorithm or (TrainingStep() if is_lightning(made) else BackPropagation())
    if not isinstance(given, TrainingStep):
        return asked._replace(algorithm=given)
    if weight is not None or compiled:
        key = f"weight = {weight!r}" if weight is not None else "compile = True"
        raise ConfigError(f"{key} has no effect on a training_step, which computes its own loss; leave it out")
    named = asked.optimizer
    if not (isinstance(named, NamedOptimizer) and (named.name, named.settings) == ("sgd", {"lr": RATE})):
        return asked._replace(algorithm=given)
    with torch.random.fork_rng(devices=[]):
        found = configured(build_module(made, seed))
    if asked.scheduler is not None or found.scheduler is None:
        return Stepping(given, OwnOptimizer(), asked.scheduler, asked.every)
    return Stepping(given, OwnOptimizer(), own_scheduler, found.every)


def refuse_not_finite(model: Any) -> None:
    """Refuses a network that is given with NaN in it: nothing that it learns would put that right."""
    if not isinstance(model, nn.Module):
        return
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta or not value.is_floating_point() or torch.nn.parameter.is_lazy(value):
            continue
        if not is_finite(value.detach()) and (found := int(value.isnan().sum())):
            raise ConfigError(
                f"model holds NaN: {found} of {value.numel()} values of {name!r}. Numbers are needed there (infinity "
                "too, in a mask); load other weights, or make the network anew"
            )


def may_take_names(model: Any) -> bool:
    """Whether a network is called by the names of columns; of one that is yet to be made it may be so."""
    return takes_names(model) if isinstance(model, nn.Module) else model not in ZOO.values()


def refuse_impossible(
    spec: TrainSpec, strategy: Strategy, codec: str, placement: Placement, *, validated: bool
) -> None:
    """Refuses what cannot go together before any process starts."""
    own = strategy.setting(Measured(1, 2, 0, None, None), None).codec
    if codec != "float32" and own is not None:
        warnings.warn(f"codec={codec!r} has no effect: {name_of(strategy)} packs in {own} itself", stacklevel=5)
    if placement.shares and not isinstance(spec.algorithm, BackPropagation):
        raise ConfigError(f"a placement spreads back-propagation; {spec.algorithm.name} needs placement=tw.Whole()")
    if placement.shares and (spec.accumulate > 1 or spec.compile or spec.precision == "float16"):
        raise ConfigError(
            "a placement computes a step's rows at once, by its own network; leave accumulate at 1, compile at False, "
            "and precision at 'float32' or 'bfloat16', or use placement=tw.Whole()"
        )
    if isinstance(spec.optimizer, NamedOptimizer):
        spec.optimizer([nn.Parameter(torch.zeros(1))])
    if isinstance(spec.scheduler, NamedScheduler):
        spec.scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    plateau = isinstance(spec.scheduler, NamedScheduler) and spec.scheduler.name == "plateau"
    if plateau and not validated:
        warnings.warn(
            "scheduler 'plateau' has no effect: it follows the validation loss, and there are no validation rows",
            stacklevel=5,
        )
    late = strategy.timing == "async" and strategy.subject == "gradients"
    if late and getattr(spec.optimizer, "on_workers_only", False):
        raise ConfigError(
            f"{spec.optimizer!r} cannot step at servers, as {name_of(strategy)} has it: its rates differ by parameter; "
            "use a strategy whose workers step themselves, such as tw.SparkNet()"
        )
    if strategy.timing == "async" and codec != "float32":
        raise ConfigError(f"codec={codec!r} is not possible with {name_of(strategy)}: the table sends float32")


def warn_without_effect(
    *, validated: bool, saved: bool, watching: Mapping[str, Any], saving: Mapping[str, Any]
) -> None:
    """Warns of arguments that do nothing in this run.

    Args:
        validated: whether there are validation rows, or a callback that is given models.
        saved: whether there is a folder.
        watching: arguments by name that are of evaluations.
        saving: arguments by name that are of the folder.
    """
    for name, value in watching.items() if not validated else ():
        if value:
            _log.warning("%s has no effect: nothing is evaluated without validation rows; give validation=0.1", name)
    for name, value in saving.items() if not saved else ():
        if value:
            _log.warning("%s has no effect: there is no folder for checkpoints; give out=…", name)


def refuse_few_rows(rows: int | None, workers: int, placement: Placement) -> None:
    """Refuses fewer training rows than workers where each worker of a group needs some.

    Args:
        rows: training rows, where they are known.
        workers: of the run.
        placement: how replicas span them.
    """
    if rows is not None and rows < workers and placement.size > 1:
        raise DataError(
            f"there are {rows} rows to train on and {workers} workers, and each worker of a group needs some; use "
            f"tw.Local(workers={max(1, rows // placement.size) * placement.size}), or placement=tw.Whole()"
        )


def target_for(
    until: str | None, stop: EarlyStopping | None, metrics: Iterable[str], *, validated: bool
) -> Target | None:
    """The target that ends the run; refuses metrics that nobody measures, and values that they cannot have."""
    measured = ["val_loss", *(f"val_{name}" for name in metrics)]
    if stop is not None:
        refuse_unmeasured("stop", stop.metric, measured, validated=validated)
        if not validated:
            raise ConfigError("stop looks at evaluations and there are none; give validation=0.1, or other rows")
    if until is None:
        return None
    target = Target.parse(until)
    refuse_unmeasured("until", target.metric, measured, validated=validated)
    shares = not isinstance(metrics, Mapping) and target.metric.removeprefix("val_") in SHARES
    if shares and (target.value > 1 if target.at_least else target.value < 0):
        raise ConfigError(
            f"until = {until!r} cannot be reached: {target.metric} is a share from 0 to 1; write 0.97 for 97 %"
        )
    falls, rises = target.metric in ("val_loss", TRAIN_LOSS), shares
    if (falls and target.at_least) or (rises and not target.at_least):
        way, sign = ("falls", "<=") if falls else ("rises", ">=")
        _log.warning(
            "until = %r ends the run early: %s %s as a model learns; write %s", until, target.metric, way, sign
        )
    return target


def refuse_unvalidated(validation: Any, target: Target | None, stop: EarlyStopping | None) -> None:
    """Refuses to wait for evaluations that never come, since no row is held back; warns where nobody waits."""
    share = isinstance(validation, float | int)
    found = f"validation = {validation} of so few rows holds back none" if share else "the validation data has no rows"
    if stop is not None or (target is not None and target.metric != TRAIN_LOSS):
        asked = "stop" if stop is not None else "until"
        raise DataError(f"{found}, and {asked} looks at validation rows; give a larger share, or other rows")
    warnings.warn(f"{found}: nothing will be evaluated; give a larger share, or other rows", stacklevel=5)


def columns_for(
    present: Sequence[str], inputs: Sequence[str] | None, label: str | None, weight: str | None
) -> tuple[str, ...]:
    """The columns given to the model."""
    if weight is not None and weight == label:
        raise ConfigError(f"weight = {weight!r} is the column of labels too; name the column of row weights, or none")
    if inputs is not None:
        return tuple(inputs)
    found = tuple(n for n in present if n not in (label, weight))
    if not found:
        raise ConfigError(f"no input columns are left in {list(present)}; name them with inputs=[…]")
    return found


def wanted_for(trial: Trial, *, validation: Any, indicator: str | None) -> Wanted:
    """What a run needs of its data, and what is to be looked at in it before anything starts.

    Args:
        trial: what is tried on the first row; all columns are read where the user's own transform makes some.
        validation: what `fit` was given.
        indicator: a column that is true for validation rows.
    """
    columns = trial.columns
    return Wanted(
        columns=None
        if trial.transforms
        else (*(columns.reads or columns.inputs), *(n for n in (columns.label, columns.weight) if n)),
        validation=float(validation) if isinstance(validation, float | int) else 0.0,
        indicator=indicator,
        seed=trial.spec.seed,
        label=None if trial.transforms else columns.label,
        labels=columns.labels,
        measure=trial,
        nullable=trial.nullable,
        weight=None if trial.transforms else columns.weight,
    )
