"""Means over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError


def mean(values: Sequence[Tensor]) -> Tensor:
    """The arithmetic mean of the workers' vectors.

    R(x¹…xᴷ) = 1/K Σ xⁱ

    >>> mean([torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0])])
    tensor([2., 2.])

    SparkNet (Moritz et al. 2016), Listing 3.
    """
    return weighted_mean(values, [1.0] * len(values))


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of the workers' vectors, each counted by what it did; a weight of zero leaves it out.

    R(x¹…xᴷ) = (Σ τⁱ xⁱ) / Σ τⁱ        τⁱ = steps (or rows) of worker i since its last contribution

    >>> weighted_mean([torch.tensor([1.0]), torch.tensor([4.0])], [2.0, 1.0])
    tensor([2.])
    >>> weighted_mean([torch.tensor([1.0]), torch.tensor([float("nan")])], [1.0, 0.0])
    tensor([1.])

    MPCA SGD (eq. 9).
    """
    total_weight = float(sum(weights))
    if total_weight <= 0 or min(weights) < 0:
        raise ConfigError(f"weights {list(weights)} have no positive sum; at least one worker must count")
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        if weight > 0:
            total.add_(value, alpha=weight)
    return total.div_(total_weight)


def displacement(joint: Tensor, local: Tensor) -> Tensor:
    """How far the joint model is from a replica: what a worker contributes.

    d = x̃ − xⁱ, so that mean(d) = x̃ − mean(x)

    >>> displacement(torch.tensor([5.0]), torch.tensor([3.0]))
    tensor([2.])

    It is DiLoCo's outer gradient (Douillard et al. 2023), and small near agreement, so it compresses well.
    """
    return joint - local
