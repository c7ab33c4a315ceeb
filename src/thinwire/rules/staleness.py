"""Landing a reply that is older than the replica it lands on."""

from __future__ import annotations

import torch
from torch import Tensor


def land(x: Tensor, snapshot: Tensor, joint: Tensor) -> Tensor:
    """The replica moved to the new joint model, with the steps it made since its snapshot kept.

    x ← x + (x̃ − s)        s = the replica when it contributed

    >>> land(torch.tensor([7.0]), torch.tensor([5.0]), torch.tensor([4.0]))
    tensor([6.])

    Delay correction as in CoCoD-SGD (Shen et al. 2019); Relay's landing.
    """
    return (joint - snapshot).add_(x)


def mix(x: Tensor, joint: Tensor, keep: float) -> Tensor:
    """The replica mixed with a joint model that arrived late.

    x ← α x + (1 − α) x̃        α = `keep`

    >>> mix(torch.tensor([4.0]), torch.tensor([0.0]), 0.25)
    tensor([1.])

    Streaming DiLoCo (Douillard et al. 2025), α = 0.5.
    """
    return torch.lerp(joint, x, keep)


def compensate(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> Tensor:
    """A gradient taken at parameters that have changed since, corrected to first order.

    g + λ g ⊙ g ⊙ (x̃ − x̃ₜ)        x̃ₜ = what the worker had when it took the gradient

    >>> compensate(torch.tensor([2.0]), torch.tensor([1.5]), torch.tensor([1.0]), 0.5)
    tensor([3.])

    DC-ASGD (Zheng et al. 2017), with g ⊙ g in the Hessian's place.
    """
    return torch.addcmul(gradient, gradient * gradient, now - then, value=strength)
