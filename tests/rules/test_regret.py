"""The bound on the regret of delayed descent: its assumptions and what it says, on a convex problem."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from thinwire.rules.regret import best_sigma, delayed_rate, farthest, longest, regret_bound

RADIUS = 3.0


def losses(points: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Logistic losses of rows, convex in the parameters."""
    x, y = rows
    found: Tensor = nn.functional.softplus(-y * (x @ points))
    return found


def descended(rows: tuple[Tensor, Tensor], delay: int, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, gradients and points of a descent that applies each gradient so many updates late."""
    x, y = rows
    point, waiting = torch.zeros(x.shape[1], dtype=x.dtype), list[Tensor]()
    said, slopes, points = [], [], []
    for step in range(1, len(x) + 1):
        here = point.clone().requires_grad_()
        loss = losses(here, (x[step - 1], y[step - 1]))
        (slope,) = torch.autograd.grad(loss, here)
        said.append(loss.detach())
        slopes.append(slope)
        points.append(point)
        waiting.append(slope)
        if step > delay:
            point = point - delayed_rate(step, delay, sigma) * waiting.pop(0)
            point = point * min(1.0, RADIUS / max(float(point.norm()), 1e-12))
    return torch.stack(said), torch.stack(slopes), torch.stack(points)


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(count)
    x = torch.randn(count, 5, generator=made, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    truth = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    return x, torch.sign(x @ truth + 0.3 * torch.randn(count, generator=made, dtype=torch.float64))


def best_of(rows: tuple[Tensor, Tensor]) -> Tensor:
    """The least sum of losses of one point within the ball."""
    point = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    for _ in range(3000):
        (slope,) = torch.autograd.grad(losses(point, rows).mean(), point)
        with torch.no_grad():
            point -= slope
            point *= min(1.0, RADIUS / max(float(point.norm()), 1e-12))
    return losses(point.detach(), rows).sum()


@pytest.mark.parametrize("delay", [1, 4, 16])
def test_the_regret_of_delayed_descent_on_a_convex_problem_is_below_the_bound(delay: int) -> None:
    rows, reach, length = rows_of(600), math.sqrt(2) * RADIUS, 1.0
    sigma = best_sigma(reach, length, delay)
    said, slopes, points = descended(rows, delay, sigma)
    assert longest(slopes) <= length  # the assumptions: gradients are bounded, and so is the set
    assert farthest(points) <= reach
    regret = float(said.sum() - best_of(rows))
    exact = regret_bound(600, delay, length=length, reach=reach, sigma=sigma)
    assert regret <= exact <= regret_bound(600, delay, length=length, reach=reach)


def test_the_losses_are_convex_as_the_bound_assumes() -> None:
    made = torch.Generator().manual_seed(0)
    rows = rows_of(50)
    for _ in range(50):
        one, other = torch.randn(2, 5, generator=made, dtype=torch.float64)
        share = torch.rand(1, generator=made, dtype=torch.float64)
        between = losses(share * one + (1 - share) * other, rows)
        assert (between <= share * losses(one, rows) + (1 - share) * losses(other, rows) + 1e-12).all()


def test_the_regret_of_an_update_goes_to_zero_as_updates_become_many() -> None:
    each = [regret_bound(count, 4, length=1.0, reach=1.0) / count for count in (100, 10_000, 1_000_000)]
    assert each == sorted(each, reverse=True)
    assert each[-1] == pytest.approx(each[0] / 100)
