"""One optimizer whose state is part of the joint state: what strategies that send gradients have in common."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from thinwire.rules.optimizer import FlatOptimizer
from thinwire.strategies.base import Taken


def opened(rule: FlatOptimizer, x: Tensor) -> Any:
    """The joint state at the start of a run: the model, and what the optimizer keeps beside it."""
    return joint_of(rule, [x.clone(), *(x.new_zeros(x.shape) for _ in rule.names)])


def joint_of(rule: FlatOptimizer, values: Sequence[Tensor]) -> Any:
    """A joint state of these tensors, the model first."""
    return _joint(rule.names)(*values)


def optimized(rule: FlatOptimizer, joint: Any, gradients: Tensor, taken: Taken) -> Any:
    """The joint state after the steps of a round, by the mean of the workers' summed gradients."""
    return type(joint)(*rule.advance(joint.model, joint[1:], gradients / taken.rows, taken))


@lru_cache(maxsize=16)
def _joint(names: tuple[str, ...]) -> Any:
    return namedtuple("Joint", ("model", *names))
