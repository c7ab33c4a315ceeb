"""What a mean of gradients says of the noise in each, against numbers drawn for it."""

from __future__ import annotations

import pytest
import torch

from thinwire.rules.noise import TRUST, Spread, noise_of


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_the_square_of_a_steps_mean_gradient_is_found_from_sums_over_steps(noise: float) -> None:
    steps, workers, size = 9, 16, 20_000
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(size, generator=generator)
    each = signal + noise * torch.randn(steps, workers, size, generator=generator)
    spread = Spread()
    assert spread.value is None
    for _ in range(3):
        spread.see(float(each.mean(0).pow(2).sum(1).mean()), float(each.mean((0, 1)).pow(2).sum()))
    assert spread.value is not None
    found = noise_of(steps, workers, spread.value) ** (1 / TRUST)
    wanted = float(each.mean(1).pow(2).mean() / each.mean((0, 1)).pow(2).mean())
    assert found == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(("steps", "workers"), [(1, 8), (8, 1)])
def test_one_step_or_one_worker_is_what_it_is(steps: int, workers: int) -> None:
    assert noise_of(steps, workers, 5.0) == 1.0


def test_it_stays_between_nothing_and_all_noise() -> None:
    assert noise_of(4, 8, 0.1) == 1.0
    assert noise_of(4, 8, 1e9) == 4.0**TRUST
