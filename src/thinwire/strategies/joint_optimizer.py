"""One optimizer whose state is part of the joint state: what strategies that send gradients have in common."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from thinwire.parameters import Fragment
from thinwire.rules.optimizer import FlatOptimizer


@dataclass(frozen=True)
class Taken:
    """The steps that a round's gradients were taken for, and that the joint optimizer takes by their mean."""

    fragment: Fragment
    """The stretch of the flat vector at hand."""
    rows: float
    """How many rows, or how much weight of rows, a mean contribution is the sum of."""
    steps: int
    """Optimizer steps to take, all by the same mean gradient."""
    before: int
    """Steps that were taken of this stretch before."""
    noise: float = 1.0
    """How many times larger the mean square of one step's mean gradient is than that of the gradient at hand."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Settings that schedules move, by the optimizer's groups; those that the optimizer was made with where empty."""
    absent: frozenset[int] = frozenset()
    """Parameters, by number, that have no gradient and take no step."""
    behind: Mapping[int, int] = field(default_factory=dict)
    """By parameter, how many of the steps before it had no gradient in."""


class JointOptimizer:
    """The rule of an optimizer that all workers, or a server, take steps by."""

    def __init__(self, rule: FlatOptimizer) -> None:
        self.rule = rule

    def open(self, x: Tensor) -> Any:
        """The joint state at the start of a run: the model, and what the optimizer keeps beside it."""
        return _joint(self.rule.names)(x.clone(), *(x.new_zeros(x.shape) for _ in self.rule.names))

    def optimize(self, joint: Any, gradients: Tensor, taken: Taken) -> Any:
        """The joint state after the steps of a round, by the mean of the workers' summed gradients."""
        return type(joint)(*self.rule.advance(joint.model, joint[1:], gradients / taken.rows, taken))


@lru_cache(maxsize=16)
def _joint(names: tuple[str, ...]) -> Any:
    return namedtuple("Joint", ("model", *names))
