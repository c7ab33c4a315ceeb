"""A torch optimizer as a pure function: the same numbers as the optimizer itself, whole or in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.rules.optimizer import slots, step

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
SIZE, STEPS = 40, 8


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pieces", [1, 4])
def test_it_takes_the_steps_that_the_optimizer_takes(name: str, pieces: int) -> None:
    factory = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(SIZE, generator=generator)
    plain = nn.Parameter(start.clone())
    optimizer = factory([plain])
    names = slots(factory)
    models = list(start.chunk(pieces))
    states = [[torch.zeros_like(m) for _ in names] for m in models]
    for steps in range(STEPS):
        gradient = torch.randn(SIZE, generator=generator)
        rate = 0.05 / (1 + steps)
        plain.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for index, part in enumerate(gradient.chunk(pieces)):
            models[index], states[index] = step(factory, names, models[index], states[index], part, steps, rate)
        assert torch.allclose(torch.cat(models), plain, rtol=1e-6, atol=1e-7)


def test_its_arguments_stay_as_they_were() -> None:
    factory = OPTIMIZERS["momentum"]
    model, state, gradient = torch.ones(5), [torch.ones(5)], torch.ones(5)
    step(factory, slots(factory), model, state, gradient, 3, None)
    assert all(torch.equal(v, torch.ones(5)) for v in (model, *state, gradient))


@pytest.mark.parametrize(("name", "keeps"), [("NAdam", "mu_product"), ("ASGD", "eta")])
def test_one_that_keeps_other_numbers_is_refused(name: str, keeps: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} keeps '{keeps}'"):
        slots(lambda p: getattr(torch.optim, name)(p))
