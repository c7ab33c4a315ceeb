"""Outer optimizers: the joint model takes a step against the mean displacement as if it were a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def sgd(joint: Tensor, displacement: Tensor, lr: float) -> Tensor:
    """The joint model after a plain outer step; with `lr` 1 it becomes the workers' mean.

    x̃ ← x̃ − η Δ        Δ = x̃ − mean(x)

    >>> sgd(torch.tensor([5.0]), torch.tensor([2.0]), 1.0)
    tensor([3.])

    Local SGD; SparkNet is η = 1.
    """
    return torch.sub(joint, displacement, alpha=lr)


def nesterov(
    joint: Tensor, momentum: Tensor, displacement: Tensor, *, lr: float, decay: float
) -> tuple[Tensor, Tensor]:
    """The joint model and the outer momentum after a Nesterov step.

    m ← μ m + Δ ;  x̃ ← x̃ − η(Δ + μ m)

    >>> nesterov(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0]), lr=0.5, decay=0.5)
    (tensor([0.]), tensor([2.]))

    DiLoCo (Douillard et al. 2023), Algorithm 1 with its Nesterov outer optimizer; also Relay's.
    """
    moved = torch.add(displacement, momentum, alpha=decay)
    step = torch.add(displacement, moved, alpha=decay)
    return torch.sub(joint, step, alpha=lr), moved


def slowmo(
    joint: Tensor, momentum: Tensor, displacement: Tensor, *, lr: float, decay: float, inner_lr: float
) -> tuple[Tensor, Tensor]:
    """The joint model and the slow momentum, kept in units of the inner learning rate.

    u ← μ u + Δ/η ;  x̃ ← x̃ − α η u        α = `lr`, η = `inner_lr`

    >>> slowmo(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0]), lr=1.0, decay=0.5, inner_lr=0.5)
    (tensor([-0.5000]), tensor([3.]))

    SlowMo (Wang et al. 2020), Algorithm 1; BMUF is the same with another scaling.
    """
    moved = torch.add(momentum * decay, displacement, alpha=1.0 / inner_lr)
    return torch.sub(joint, moved, alpha=lr * inner_lr), moved
