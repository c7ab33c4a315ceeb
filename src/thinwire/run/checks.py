"""What `fit` was asked for, looked at before anything starts."""

from __future__ import annotations

import copy
import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.cluster.base import Site
from thinwire.data import Loader, Position, Sampler, Shard, write_shard
from thinwire.data.feeds import Wanted
from thinwire.errors import ConfigError, nearest
from thinwire.models.boltzmann import free_energy_gap, reconstruction_error
from thinwire.placement import Pipeline, Placement, Whole
from thinwire.replicas import Algorithm, BackPropagation, ContrastiveDivergence, TrainSpec
from thinwire.replicas.labels import labels_of
from thinwire.replicas.objectives import Metric, NamedOptimizer, NamedScheduler, Objective, metrics_of
from thinwire.replicas.torch import build_module
from thinwire.rules.compression import codec as codec_by_name
from thinwire.run.job import Columns
from thinwire.strategies import Measured, Relay, Served, Strategy, name_of
from thinwire.strategies import strategy as strategy_by_name

_log = logging.getLogger("thinwire.run")


def strategy_for(given: Strategy | str | None) -> Strategy:
    """The strategy that is meant; `Relay` unless said."""
    if given is None:
        return Relay()
    if isinstance(given, str):
        return strategy_by_name(given)
    if not isinstance(given, Strategy):
        raise ConfigError(f"strategy is {type(given).__name__}; give a strategy such as tw.Relay(), or its name")
    if not hasattr(given, "timing"):
        raise ConfigError(
            f"strategy {type(given).__name__} does not say its timing; write timing = 'barrier', 'overlap' or 'async' "
            "in its class"
        )
    return given


def carrier_for(asked: str, strategy: Strategy, where: Site) -> str:
    """The exchange that carries a strategy; refuses one that cannot."""
    name, late = name_of(strategy), strategy.timing == "async"
    if late and not isinstance(strategy, Served):
        raise ConfigError(f"{name} has timing 'async' and is no Served: derive it from thinwire.strategies.Served")
    if asked not in ("auto", "mesh", "table", "spark"):
        raise ConfigError(f"exchange = {asked!r} is not known. {nearest(asked, ('auto', 'mesh', 'table', 'spark'))}")
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
    if not isinstance(placement, Placement):
        raise ConfigError(f"placement is {type(placement).__name__}; give one such as tw.Planned(group_size=4)")
    size = placement.group_size
    if size == 1:
        return Whole()
    if where.workers % size:
        raise ConfigError(f"group_size = {size} does not divide {where.workers} workers; use one of its divisors")
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


def metrics_for(given: Sequence[str] | Mapping[str, Metric] | None, loss: object) -> Any:
    """What is measured; accuracy where the loss is one of classes."""
    if given is None:
        return ("accuracy",) if labels_of(loss).scores else ()
    return dict(given) if isinstance(given, Mapping) else tuple(given)


def objective_for(algorithm: Algorithm | None, loss: Any, metrics: Any) -> tuple[Any, Any]:
    """The loss and metrics that are meant; an algorithm without labels brings its own."""
    if isinstance(algorithm, ContrastiveDivergence) and loss is None:
        gap = {"free_energy_gap": free_energy_gap} if metrics is None else metrics
        return reconstruction_error, gap
    return ("cross_entropy" if loss is None else loss), metrics


def refuse_impossible(
    spec: TrainSpec, strategy: Strategy, codec: str, placement: Placement, on_nonfinite: str, **numbers: int | None
) -> None:
    """Refuses what cannot work before any process starts."""
    Objective(spec.loss)
    metrics_of(spec.metrics)
    codec_by_name(codec)
    own = strategy.setting(Measured(1, 2, 0, None, None), None).codec
    if codec != "float32" and own is not None:
        warnings.warn(f"codec={codec!r} has no effect: {name_of(strategy)} packs in {own} itself", stacklevel=4)
    if not isinstance(spec.algorithm, Algorithm):
        raise ConfigError(
            f"algorithm is {type(spec.algorithm).__name__}; give one such as tw.ContrastiveDivergence(k=1)"
        )
    if placement.group_size > 1 and not isinstance(spec.algorithm, BackPropagation):
        raise ConfigError(f"a placement spreads back-propagation; {spec.algorithm.name} needs placement=tw.Whole()")
    if isinstance(spec.optimizer, NamedOptimizer):
        made = spec.optimizer([nn.Parameter(torch.zeros(1))])
        if isinstance(spec.scheduler, NamedScheduler):
            spec.scheduler(made)
    late = strategy.timing == "async" and strategy.subject == "gradients"
    if late and getattr(spec.optimizer, "on_workers_only", False):
        raise ConfigError(
            f"{spec.optimizer!r} cannot step at servers, as {name_of(strategy)} has it: its rates differ by parameter; "
            "use a strategy whose workers step themselves, such as tw.SparkNet()"
        )
    if strategy.timing == "async" and codec != "float32":
        raise ConfigError(f"codec={codec!r} is not possible with {name_of(strategy)}: the table sends float32")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value} is too small; use 1 or more")
    if on_nonfinite not in ("drop", "stop"):
        raise ConfigError(f"on_nonfinite = {on_nonfinite!r} is not known; use 'drop' or 'stop'")
    if spec.precision not in ("float32", "bfloat16"):
        raise ConfigError(f"precision = {spec.precision!r} is not known; use 'float32' or 'bfloat16'")


def columns_for(
    present: Sequence[str], inputs: Sequence[str] | None, label: str | None, weight: str | None
) -> tuple[str, ...]:
    """The columns given to the model."""
    if inputs is not None:
        return tuple([inputs] if isinstance(inputs, str) else inputs)
    found = tuple(n for n in present if n not in (label, weight))
    if not found:
        raise ConfigError(f"no input columns are left in {list(present)}; name them with inputs=[…]")
    return found


def wanted_for(
    model: Any, spec: TrainSpec, columns: Columns, *, transform: bool, validation: Any, indicator: str | None
) -> Wanted:
    """What a run needs of its data, and what is to be looked at in it before anything starts.

    Args:
        model: what a worker builds its network from.
        spec: how it is trained.
        columns: what is what in the data, with the transform that the data itself brings.
        transform: whether the user's own transform makes columns: then all are read, and labels are looked at as they
            come out of it, on the workers.
        validation: what `fit` was given.
        indicator: a column that is true for validation rows.
    """
    label = None if transform else columns.label
    classes = label is not None and columns.labels.kind == "classes"
    return Wanted(
        columns=None if transform else (*columns.inputs, *(n for n in (columns.label, columns.weight) if n)),
        validation=float(validation) if isinstance(validation, float | int) else 0.0,
        indicator=indicator,
        seed=spec.seed,
        label=label,
        labels=columns.labels,
        measure=functools.partial(output_shape, model, spec.seed, columns) if classes else None,
    )


def output_shape(model: Any, seed: int, columns: Columns, row: Any) -> tuple[int, ...] | None:
    """The shape of the network's output for one row, run through it here; None where that does not work.

    A network that cannot run here is no mistake, or one that the workers tell of.
    """
    drawn = np.random.get_state()
    try:
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder, torch.random.fork_rng(devices=()):
            path = os.path.join(folder, "row")
            write_shard(path, [row], row.schema)
            loader = Loader(
                Shard.open(path),
                Sampler(1, 1, seed, 0),
                inputs=columns.inputs,
                label=None,
                transform=columns.transform,
                prefetch=0,
            )
            batch = next(loader.batches(Position(), 1))
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                module = copy.deepcopy(model) if isinstance(model, nn.Module) else build_module(model, seed)
                found = module.cpu().eval()(*batch.inputs)
        return tuple(found.shape[1:])
    except Exception as error:
        _log.info("the number of the model's outputs is not known here: %s: %s", type(error).__name__, error)
        return None
    finally:
        np.random.set_state(drawn)
