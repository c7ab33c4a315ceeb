"""Whether an optimizer can do its work where a run has it step: at a table's servers, or on parts of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.placement import Pipeline, Placement, stand_in
from thinwire.placement.deferred import network_of
from thinwire.replicas import TrainSpec
from thinwire.replicas.searches import needs_closure
from thinwire.replicas.sparse import refuse_sparse_adam
from thinwire.replicas.torch import optimizer_of
from thinwire.rules.optimizer import FlatOptimizer
from thinwire.strategies import ParameterTable, Relay, Strategy, name_of

_log = logging.getLogger("thinwire.run")
ELEMENTWISE = "SGD, Adam, AdamW, Adagrad or RMSprop"


def refuse_optimizer(
    model: nn.Module | Callable[[], nn.Module], spec: TrainSpec, strategy: Strategy, placement: Placement
) -> None:
    """Refuses an optimizer or a schedule that would not do there what it does in one process."""
    table = strategy if isinstance(strategy, ParameterTable) else None
    jointly = isinstance(strategy, Relay) and strategy.sends == "gradients"
    if table and spec.clip_norm is not None and (table.strict or table.groups != "each"):
        raise ConfigError(
            f"train.clip_norm = {spec.clip_norm} cannot be kept under {name_of(strategy)} where workers wait for each "
            "other: servers step the mean gradient piece by piece, and none of them knows its norm; use "
            "tw.Synchronous(), which comes to the same parameters, or consistency='eventual' with groups='each'"
        )
    if not table and not jointly and not placement.shares:
        return
    factory = (table and table.optimizer) or spec.optimizer
    parameters = _parameters(model, spec.seed)
    if parameters is None:
        return
    made = optimizer_of(factory, parameters, torch.device("cpu"))
    if not needs_closure(made):
        refuse_sparse_adam(made, nn.Module(), dense=spec.dense, clip_norm=spec.clip_norm)
    rule = FlatOptimizer(factory, made)
    if isinstance(strategy, Relay):
        strategy.steps_jointly(rule)  # refuses one that cannot, where it is to
    if needs_closure(made) or (jointly and not placement.shares):
        return
    pipeline = isinstance(placement, Pipeline) and not table
    if not (rule.is_tensorwise if pipeline else rule.is_elementwise):
        units = ("tensors", "tensor") if pipeline else ("the numbers of a tensor", "number")
        where = f"{name_of(strategy)} steps the model in pieces" if table else f"{placement!r} spreads it over workers"
        raise ConfigError(
            f"train.optimizer {type(made).__name__} steps {units[0]} together, and {where}; use an optimizer that "
            f"steps each {units[1]} alone, such as {ELEMENTWISE}, or tw.Synchronous() with whole replicas"
        )
    if table:
        _ = rule.names  # refuses an optimizer that keeps what cannot be cut
    if table and factory is spec.optimizer and spec.scheduler is not None:
        _refuse_cycles(spec.scheduler(made), name_of(strategy))


def _refuse_cycles(scheduler: Any, name: str) -> None:
    for one in _schedulers(scheduler):
        if getattr(one, "cycle_momentum", False):
            raise ConfigError(
                f"train.scheduler {type(one).__name__} changes the momentum, and servers of {name} hear of learning "
                "rates only; give it cycle_momentum=False, or use tw.Synchronous()"
            )


def _schedulers(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for one in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(one)


def _parameters(model: nn.Module | Callable[[], nn.Module], seed: int) -> list[nn.Parameter] | None:
    """Stand-ins for a model's parameters; None where it cannot be made here, which workers will tell of."""
    try:
        with torch.random.fork_rng(devices=()):
            whole, _ = network_of(model, seed)
            return [stand_in(p) for p in whole.parameters()]
    except Exception as error:
        _log.info("the model's parameters are not known here: %s: %s", type(error).__name__, error)
        return None
