"""Refuses an optimizer that evaluates the loss itself where what it evaluates would not be what workers exchange."""

from __future__ import annotations

import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.placement import Placement
from thinwire.placement.deferred import network_of
from thinwire.replicas import TrainSpec
from thinwire.replicas.searches import needs_closure
from thinwire.rules.compression import codec
from thinwire.strategies import Measured, Strategy, name_of

_log = logging.getLogger("thinwire.run")
CYCLES = (0, 1, 2, 10, 100, 1_000, 1_000_000)
"""At which a strategy is asked for its gradient term."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What of a run decides whether a second evaluation within a step is right."""

    spec: TrainSpec
    strategy: Strategy
    placement: Placement
    exchange: str
    codec: str
    """The run's own, for strategies that leave it open."""


def refuse_searches(model: Any, setup: Setup) -> None:
    """Makes the optimizer on the driver, and refuses it where its step needs a closure and the run has no right one.

    A factory that fails here is left to the workers, which look again at the optimizer that they step with.
    """
    if not _reason(setup):  # factories are the user's own: none is called without need
        return
    for factory in (setup.spec.optimizer, getattr(setup.strategy, "optimizer", None)):
        made = None if factory is None else _made(factory, model, setup.spec.seed)
        if made is not None:
            refuse_search(made, setup)


def refuse_search(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer], setup: Setup) -> None:
    """Refuses an optimizer whose step needs a closure in a run that has no right one.

    Raises:
        ConfigError: With the reason, and what to use instead.
    """
    if not needs_closure(optimizer):
        return
    name = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__
    why = _reason(setup)
    if why:
        raise ConfigError(f"train.optimizer is {name}, whose step evaluates loss and gradient again, and {why}")


def _reason(setup: Setup) -> str:
    strategy, placement, clip_norm = setup.strategy, setup.placement, setup.spec.clip_norm
    name = name_of(strategy)
    if placement.shares:
        return (
            f"{type(placement).__name__} spreads one pass over {placement.group_size} workers, which make no second "
            "one within a step; use placement=tw.Whole(), or an optimizer such as SGD or Adam"
        )
    if strategy.subject == "gradients" and not _searches(strategy):
        return (
            f"{name} exchanges one gradient a step, which a second evaluation would drop; use tw.Synchronous(), a "
            "strategy that exchanges parameters, such as tw.SparkNet(), or an optimizer such as SGD or Adam"
        )
    if _adds_to_gradients(strategy):
        return (
            f"{name} adds a term to the gradient, which a second evaluation would lack; use a strategy without one, "
            "such as tw.SparkNet() or tw.MPCA(form='replica'), or an optimizer such as SGD or Adam"
        )
    if clip_norm is not None:
        return (
            f"clip_norm = {clip_norm} would shorten the first gradient of a step alone; leave clip_norm out, or "
            "use an optimizer such as SGD or Adam"
        )
    return _lossy(setup) if strategy.subject == "gradients" else ""


def _searches(strategy: Strategy) -> bool:
    return strategy.searches and strategy.timing == "barrier" and strategy.quorum == 1.0


def _lossy(setup: Setup) -> str:
    own = setup.strategy.setting(Measured(1, 2, 0, None, None), None).codec
    packed = codec(own or setup.codec)
    if packed.lossy:
        return (
            f"codec = {packed.name!r} rounds the gradients of an evaluation, and not its loss; use codec='float32', or "
            "an optimizer such as SGD or Adam"
        )
    if setup.exchange == "spark":
        return (
            "exchange = 'spark' takes a job for each evaluation, which no test covers; use exchange='mesh', a strategy "
            "that exchanges parameters, such as tw.SparkNet(), or an optimizer such as SGD or Adam"
        )
    return ""


def _adds_to_gradients(strategy: Strategy) -> bool:
    if type(strategy).gradient_term is Strategy.gradient_term:
        return False
    x = torch.zeros(1)
    _, worker = strategy.open(x)
    return any(strategy.gradient_term(worker, x, cycle) is not None for cycle in CYCLES)


def _made(
    factory: Callable[[Any], Any], model: Any, seed: int
) -> torch.optim.Optimizer | type[torch.optim.Optimizer] | None:
    """What a factory makes of one parameter, or of the model's own where it refuses that; None where both fail.

    A class is its own answer.
    """
    kind = factory.func if isinstance(factory, functools.partial) else factory
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return kind
    found = None
    state, drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for parameters in (_one, lambda: network_of(model, seed)[0].parameters()):
                try:
                    found = factory(parameters())
                    break
                except Exception as error:
                    _log.info("the optimizer is not known here: %s: %s", type(error).__name__, error)
    finally:
        random.setstate(state)
        np.random.set_state(drawn)
    return found if isinstance(found, torch.optim.Optimizer) else None


def _one() -> Iterator[nn.Parameter]:
    yield nn.Parameter(torch.zeros(1))
