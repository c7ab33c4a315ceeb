"""The parameter table: gradients go to servers, whose optimizer makes the parameters that come back."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.parameters import FlatParameters, Fragment
from thinwire.rules.optimizer import FlatOptimizer
from thinwire.rules.staleness import compensate
from thinwire.strategies.base import Nothing, Progress, Setting, Share, Strategy, Subject
from thinwire.strategies.checks import at_least, count_or
from thinwire.strategies.handlers import TableHandlers, handlers_of
from thinwire.strategies.joint_optimizer import JointOptimizer, Taken
from thinwire.strategies.served import Served


@dataclass(frozen=True, kw_only=True)
class ParameterTable(Served):
    """Stochastic gradient descent with a parameter table, as in SINGA and Downpour.

    Args:
        consistency: "strict" waits for all workers at every step, which then equals one worker with all their rows;
            "eventual" applies a group's gradients as they come; `TableHandlers` of your own decide otherwise.
        groups: worker groups; the workers of one wait for each other, groups do not. "each" makes every worker one.
        ahead: steps that a worker may make while replies to its gradients are on their way, where it waits for nobody.
        staleness: by how many updates a worker may be ahead of the slowest (stale synchronous parallel); None: any.
        compensation: λ of delay compensation (DC-ASGD), for gradients of parameters that have changed since; 0: none.
        optimizer: makes the servers' optimizer from parameters; None takes the one that `fit` is given.
        servers: on how many workers the joint model lives, a share each; "spread" is on all of them, "driver" on a
            process beside the driver, which has no rows.
        tuple_size: elements of the largest tuple, the piece of the joint model that is sent and updated as one.
        log_every: updates of a tuple between two checkpoints of it, which a server lost is recovered from; "auto" is
            16, or twice the workers where that is more.
    """

    subject: ClassVar[Subject] = "gradients"

    consistency: Literal["strict", "eventual"] | TableHandlers = "eventual"
    groups: int | Literal["each"] = "each"
    ahead: int = 0
    staleness: int | None = None
    compensation: float = 0.0
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        handlers_of(self.consistency, self.staleness)
        count_or(self, "each", groups=self.groups)
        at_least(self, 0, ahead=self.ahead, staleness=self.staleness, compensation=self.compensation)
        if self.optimizer is not None and not callable(self.optimizer):
            raise ConfigError(
                f"ParameterTable.optimizer = {reprlib.repr(self.optimizer)} cannot be called; it must make an "
                "optimizer from parameters, as torch.optim.SGD does. Leave it out to take the one of train.optimizer."
            )

    def with_optimizer(self, factory: Callable[[Any], torch.optim.Optimizer]) -> Strategy:
        return self if self.optimizer is not None else replace(self, optimizer=factory)

    def laid_out(self, parameters: FlatParameters, make: Callable[[Any], torch.optim.Optimizer]) -> Strategy:
        factory = self.optimizer or _plain
        return replace(self, optimizer=FlatOptimizer(factory, make(factory), parameters))

    def follows(self, factory: Callable[[Any], torch.optim.Optimizer]) -> bool:
        return self._rule.factory is factory

    @property
    def handlers(self) -> TableHandlers:
        return handlers_of(self.consistency, self.staleness)

    @property
    def in_flight(self) -> int:
        waits = self.strict or self.compensation or self.groups != "each"
        return 1 if waits else 1 + self.ahead

    def group_of(self, worker: int) -> int:
        return worker if self.groups == "each" else worker % self.groups

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= 1

    def weight(self, share: Share) -> float:
        return float(share.rows)

    def open(self, x: Tensor) -> tuple[Any, Nothing]:
        return self.joint_optimizer.open(x), Nothing()

    def parameters_in(self, fragment: Fragment) -> Sequence[int]:
        return [number for number, _ in self._rule.inside(fragment)]

    def correct(self, values: Tensor, now: Tensor, then: Tensor | None) -> Tensor:
        return compensate(values, now, then, self.compensation) if self.compensation and then is not None else values

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Any]:
        whole = Taken(Fragment(0, mean.numel()), rows=1.0, steps=1, before=cycle)
        merged = self.joint_optimizer.optimize(joint, mean, whole)
        return merged.model, merged

    @property
    def joint_optimizer(self) -> JointOptimizer:  # type: ignore[override]
        return JointOptimizer(self._rule)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return reply, worker

    @property
    def _rule(self) -> FlatOptimizer:
        return self.optimizer if isinstance(self.optimizer, FlatOptimizer) else _everywhere(self.optimizer or _plain)


@lru_cache(maxsize=16)
def _everywhere(factory: Callable[[Any], torch.optim.Optimizer]) -> FlatOptimizer:
    return FlatOptimizer(factory)


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
