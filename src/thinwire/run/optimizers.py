"""Whether an optimizer can do its work where a run has it step: at a table's servers, or on parts of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from thinwire.errors import ConfigError, ThinwireError
from thinwire.placement import Pipeline, Placement, stand_in
from thinwire.placement.deferred import network_of
from thinwire.replicas import TrainSpec
from thinwire.replicas.objectives import NamedScheduler
from thinwire.replicas.searches import needs_closure
from thinwire.replicas.sparse import refuse_sparse_adam
from thinwire.replicas.torch import optimizer_of
from thinwire.rules.optimizer import BY_ANOTHER, MOVING, FlatOptimizer, draws, hidden_by
from thinwire.strategies import ParameterTable, Relay, Strategy, name_of

_log = logging.getLogger("thinwire.run")
MOVES = 3
"""Of a schedule, to see what it moves."""
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
    if isinstance(strategy, Relay) and strategy.sends == "auto" and spec.scheduler is not None:
        jointly = not isinstance(spec.scheduler, NamedScheduler)
    if not table and not jointly and not placement.shares:
        return
    factory = (table and table.optimizer) or spec.optimizer
    made = _made(factory, model, spec.seed)
    if made is None:
        return
    if not needs_closure(made):
        refuse_sparse_adam(made, nn.Module(), dense=spec.dense, clip_norm=spec.clip_norm)
    rule = FlatOptimizer(factory, made)
    if isinstance(strategy, Relay) and strategy.steps_jointly(rule) and spec.scheduler is not None:
        _refuse_moves(spec.scheduler, made, name_of(strategy), MOVING)
    if needs_closure(made) or (jointly and not placement.shares):
        return
    _refuse_pieces(rule, type(made).__name__, table, placement, name_of(strategy))
    if table and factory is spec.optimizer and spec.scheduler is not None:
        _refuse_moves(spec.scheduler, made, name_of(strategy), ("lr",))


def refuse_draws(factory: Any, made: torch.optim.Optimizer, name: str) -> None:
    """Refuses an optimizer that draws random numbers, of which each replica would have others.

    Args:
        factory: what made it.
        made: the optimizer.
        name: the strategy's.
    """
    if not needs_closure(made) and draws(FlatOptimizer(factory, made)):
        raise ConfigError(
            f"train.optimizer {type(made).__name__} draws random numbers as it steps, and replicas of {name} are equal "
            "because they take equal steps; use a strategy that exchanges parameters, such as tw.SparkNet(), or an "
            "optimizer that draws none"
        )


def _refuse_pieces(
    rule: FlatOptimizer, kind: str, table: ParameterTable | None, placement: Placement, name: str
) -> None:
    """Refuses an optimizer that cannot step parts of a model apart from each other."""
    if (hidden := hidden_by(rule)) and (table or hidden.startswith(BY_ANOTHER)):
        where = f"{name} steps parts of" if table else f"members of {placement!r} step parts of"
        raise ConfigError(
            f"train.optimizer {kind} {hidden}, and {where} the model, each with a state of its "
            "own; keep what it learns in self.state[parameter], use an optimizer such as "
            f"{ELEMENTWISE}, or tw.Synchronous() with whole replicas"
        )
    pipeline = isinstance(placement, Pipeline) and not table
    if not (rule.is_tensorwise if pipeline else rule.is_elementwise):
        units = ("tensors", "tensor") if pipeline else ("the numbers of a tensor", "number")
        where = f"{name} steps the model in pieces" if table else f"{placement!r} spreads it over workers"
        raise ConfigError(
            f"train.optimizer {kind} steps {units[0]} together, and {where}; use an optimizer that "
            f"steps each {units[1]} alone, such as {ELEMENTWISE}, or tw.Synchronous() with whole replicas"
        )
    if table:
        _ = rule.names  # refuses an optimizer that keeps what cannot be cut


def _refuse_moves(make: Any, made: torch.optim.Optimizer, name: str, heard: Sequence[str]) -> None:
    """Refuses a schedule that moves settings which those that step parameters do not hear of."""
    before = [dict(group) for group in made.param_groups]
    try:
        scheduler = make(made)
        made._opt_called = True  # type: ignore[attr-defined]  # torch warns of a scheduler that moves first
        for _ in range(MOVES):
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
    except Exception as error:  # the trial of a row tells of it
        _log.info("the scheduler cannot be made here: %s: %s", type(error).__name__, error)
        return
    finally:
        moved = {
            key
            for group, old in zip(made.param_groups, before, strict=True)
            for key, value in old.items()
            if key not in ("params", *heard) and group.get(key) != value
        }
        for group, old in zip(made.param_groups, before, strict=True):
            group.update(old)
    if moved & {"momentum", "betas"}:
        raise ConfigError(
            f"train.scheduler {type(scheduler).__name__} changes the momentum, and servers of {name} hear of learning "
            "rates only; give it cycle_momentum=False, or use tw.Synchronous()"
        )
    if moved:
        raise ConfigError(
            f"train.scheduler {type(scheduler).__name__} changes {', '.join(sorted(moved))}, and what steps the "
            f"parameters under {name} hears of {', '.join(heard)} only; move the learning rate alone, or use "
            "tw.Synchronous()"
        )


def _made(factory: Any, model: Any, seed: int) -> torch.optim.Optimizer | None:
    """What a factory makes of stand-ins for a model's parameters; None where the trial of a row tells why not."""
    parameters = _parameters(model, seed)
    if parameters is None:
        return None
    try:
        return optimizer_of(factory, parameters, torch.device("cpu"))
    except ThinwireError:
        raise
    except Exception as error:
        _log.info("the optimizer cannot be made here: %s: %s", type(error).__name__, error)
        return None


def _parameters(model: nn.Module | Callable[[], nn.Module], seed: int) -> list[nn.Parameter] | None:
    """Stand-ins for a model's parameters; None where it cannot be made here, which workers will tell of."""
    try:
        with torch.random.fork_rng(devices=()):
            whole, _ = network_of(model, seed)
            return [stand_in(p) for p in whole.parameters()]
    except Exception as error:
        _log.info("the model's parameters are not known here: %s: %s", type(error).__name__, error)
        return None
