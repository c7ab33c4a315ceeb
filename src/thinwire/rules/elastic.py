"""Elastic averaging: replica and joint model pull at each other."""

from __future__ import annotations

import torch
from torch import Tensor


def pull_replica(x: Tensor, joint: Tensor, pull: float) -> Tensor:
    """The replica, drawn towards the joint model.

    xⁱ ← xⁱ − α(xⁱ − x̃)

    >>> pull_replica(torch.tensor([4.0]), torch.tensor([0.0]), 0.25)
    tensor([3.])

    EASGD (Zhang et al. 2015) in the form of MPCA SGD, eq. 2.
    """
    return torch.sub(x, x - joint, alpha=pull)


def pull_joint(joint: Tensor, x: Tensor, pull: float) -> Tensor:
    """The joint model, drawn towards the replica by as much as the replica was drawn towards it.

    x̃ ← x̃ + α(xⁱ − x̃)

    >>> pull_joint(torch.tensor([0.0]), torch.tensor([4.0]), 0.25)
    tensor([1.])

    EASGD (Zhang et al. 2015) in the form of MPCA SGD, eq. 3.
    """
    return torch.add(joint, x - joint, alpha=pull)


def symmetric_pull(workers: int, strength: float = 0.9) -> float:
    """The pull per worker for which K workers together move the joint model by `strength`.

    α = strength / K

    >>> symmetric_pull(9)
    0.1

    EASGD (Zhang et al. 2015), β = Kα = 0.9.
    """
    return strength / workers


def difference(joint: Tensor, x: Tensor, pull: float) -> Tensor:
    """What moves: taken from the replica, given to the joint model.

    d = α(xⁱ − x̃)        xⁱ ← xⁱ − d        x̃ ← x̃ + d

    >>> difference(torch.tensor([0.0]), torch.tensor([4.0]), 0.25)
    tensor([1.])

    EASGD (Zhang et al. 2015), Algorithm 1: both eq. 2 and eq. 3 of MPCA SGD, from one subtraction.
    """
    return torch.mul(x - joint, pull)


def look_ahead(x: Tensor, before: Tensor, momentum: float) -> Tensor:
    """The point at which the gradient is taken: the replica, moved on as it moved in its last step.

    x + δv        v = x − (x before the last step)

    >>> look_ahead(torch.tensor([3.0]), torch.tensor([1.0]), 0.5)
    tensor([4.])

    EAMSGD (Zhang et al. 2015), Algorithm 2: v ← δv − η∇f(x + δv), x ← x + v, where a plain step does the rest.
    """
    return torch.add(x, x - before, alpha=momentum)
