"""What delayed stochastic gradient descent loses against the best fixed parameters, at most.

Gradients are applied τ updates after they were asked for, as by workers of a parameter table in turn. Symbols: T
updates, τ the delay, L a bound on the length of gradients, F² a bound on half the squared distance of any two points,
σ the learning rate's constant. The losses are convex. Langford, Smola and Zinkevich (*Slow learners are fast*, 2009)
have the bound; the proof of convergence of Shrivastava et al. (2017) is along its lines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def delayed_rate(step: int, delay: int, sigma: float) -> float:
    """The learning rate of an update, the first of which is number τ + 1.

    η_t = σ / √(t − τ)

    >>> delayed_rate(5, 1, 0.4)
    0.2

    Langford et al., Theorem 2.
    """
    return sigma / math.sqrt(step - delay)


def best_sigma(reach: float, length: float, delay: int) -> float:
    """The constant of the learning rate for which the bound is smallest.

    σ = F / (L √(2 τ))

    >>> best_sigma(2.0, 1.0, 2)
    1.0

    Langford et al., Theorem 2.
    """
    return reach / (length * math.sqrt(2 * delay))


def regret_bound(updates: int, delay: int, *, length: float, reach: float, sigma: float | None = None) -> float:
    """The most by which the sum of T losses is above that of the best fixed parameters.

    σ L² √T + F² √T / σ + L² σ τ² / 2 + 2 L² σ τ √T, and with the best σ at most 4 F L √(τ T) for T ≥ τ²

    >>> regret_bound(100, 4, length=1.0, reach=1.0)
    80.0
    >>> regret_bound(100, 4, length=1.0, reach=1.0, sigma=best_sigma(1.0, 1.0, 4)) < 80.0
    True

    Langford et al., Theorem 2.
    """
    root = math.sqrt(updates)
    if sigma is None:
        return 4 * reach * length * math.sqrt(delay * updates)
    once, twice = length**2 * sigma, 2 * length**2 * sigma * delay * root
    return once * root + reach**2 * root / sigma + once * delay**2 / 2 + twice


def longest(gradients: Tensor) -> float:
    """L as it is seen: the length of the longest gradient, a row each.

    >>> longest(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    5.0
    """
    return float(torch.linalg.vector_norm(gradients, dim=1).max())


def farthest(points: Tensor) -> float:
    """F as it is seen: √½ times the largest distance of two points, a row each.

    >>> round(farthest(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0]])) ** 2, 5)
    2.5
    """
    return float(torch.cdist(points, points).max()) / math.sqrt(2)
