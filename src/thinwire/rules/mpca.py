"""Multi-phase coordinated asynchronous SGD: extrapolation, pull, blending and their schedules."""

from __future__ import annotations

import torch
from torch import Tensor


def trajectory(velocity: Tensor, joint: Tensor, previous: Tensor, smoothing: float) -> Tensor:
    """The smoothed direction in which the joint model has been moving.

    ṽₜ = δ ṽₜ₋₁ + (1 − δ)(x̃ₜ − x̃ₜ₋₁)

    >>> trajectory(torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([3.0]), 0.5)
    tensor([1.5000])

    MPCA SGD, eq. 4.
    """
    return (velocity * smoothing).add_(joint - previous, alpha=1.0 - smoothing)


def extrapolate(joint: Tensor, velocity: Tensor, lookahead: float) -> Tensor:
    """Where the joint model is expected to be when its reply lands.

    x̃*ₜ₊ᵧ = x̃ₜ + γ ṽₜ

    >>> extrapolate(torch.tensor([5.0]), torch.tensor([2.0]), 0.5)
    tensor([6.])

    MPCA SGD, eq. 5.
    """
    return torch.add(joint, velocity, alpha=lookahead)


def penalty_gradient(x: Tensor, target: Tensor, pull: float) -> Tensor:
    """What the penalty (α/2)‖x − x̃*‖² adds to the gradient.

    ∇ = α(xⁱ − x̃*)

    >>> penalty_gradient(torch.tensor([3.0]), torch.tensor([1.0]), 0.5)
    tensor([1.])

    MPCA SGD, eq. 6.
    """
    return (x - target).mul_(pull)


def pull_replica(x: Tensor, target: Tensor, pull: float, *, out: Tensor | None = None) -> Tensor:
    """The replica shifted towards the extrapolated joint model, before each gradient is computed.

    xⁱ ← xⁱ − α(xⁱ − x̃*)

    >>> pull_replica(torch.tensor([3.0]), torch.tensor([1.0]), 0.25)
    tensor([2.5000])

    MPCA SGD, eq. 7. `out` may be `x` itself: one fused pass.
    """
    return torch.lerp(x, target, pull, out=out)


def blend(joint: Tensor, mean: Tensor, rate: float) -> Tensor:
    """The joint model, replaced by the workers' mean to the degree β.

    x̃ₜ = (1 − β) x̃ₜ₋₁ + β R(x¹…xᴷ)

    >>> blend(torch.tensor([2.0]), torch.tensor([4.0]), 0.75)
    tensor([3.5000])

    MPCA SGD, eq. 8.
    """
    return torch.lerp(joint, mean, rate)


def blend_schedule(cycle: int, *, start: float = 1.0, end: float = 0.9, cycles: float = 20) -> float:
    """β for one exchange cycle: a constant factor takes it from `start` to `end` over the first `cycles`.

    >>> blend_schedule(0), round(blend_schedule(10), 4), blend_schedule(20), blend_schedule(500)
    (1.0, 0.9487, 0.9, 0.9)

    MPCA SGD, §4.5 and §7.1.
    """
    if cycle >= cycles:
        return end
    return float(start * (end / start) ** (cycle / cycles))


def lookahead_schedule(cycle: int, *, end: float = 0.7, cycles: float = 20) -> float:
    """γ for one exchange cycle: from no extrapolation at all, linearly, to `end`.

    >>> lookahead_schedule(0), lookahead_schedule(10), lookahead_schedule(40)
    (0.0, 0.35, 0.7)

    MPCA SGD, §4.3: start low while changes are large and noisy, and ramp up.
    """
    return end * min(1.0, cycle / cycles)


def measured_pull(period: float, *, strength: float = 0.55, least: float = 0.005, most: float = 0.05) -> float:
    """α for workers that hear of the joint model once in so many steps: what they are pulled by in a period is alike.

    α = 0.55 / period, from 0.005 to 0.05

    >>> [round(measured_pull(steps), 3) for steps in (1, 11.6, 29.2, 107.8, 1000)]
    [0.05, 0.047, 0.019, 0.005, 0.005]

    MPCA SGD searched α for each network: 0.05 for ResNet-110 and 0.005 for VGG-A (§7), whose exchanges take 11.6 and
    107.8 steps (Table 1). The rule goes through both.
    """
    return min(most, max(least, strength / max(period, 1e-9)))


def pull_schedule(
    cycle: int, *, peak: float = 0.5, end: float = 0.05, free_cycles: int = 1, decay_cycles: float = 20
) -> float:
    """α for one exchange cycle: free at first, then a strong pull that decays to `end`.

    >>> [round(pull_schedule(c), 4) for c in (0, 1, 11, 21, 100)]
    [0.0, 0.5, 0.1581, 0.05, 0.05]
    >>> pull_schedule(3, end=0.0)
    0.0

    MPCA SGD, §6.3: α = 0, then 0.5, decayed until the first value of the actual schedule.
    """
    if cycle < free_cycles or end <= 0.0:
        return 0.0
    passed = min(1.0, (cycle - free_cycles) / max(1, decay_cycles))
    return float(peak * (end / peak) ** passed) if peak > end else end
