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
