"""State of torch's own objects, put back into new ones that must go on as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from thinwire.checkpoint import decode, encode

Same = Callable[[object, object], bool]

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, betas=(0.8, 0.99)),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "Adamax": lambda p: optim.Adamax(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adafactor": lambda p: optim.Adafactor(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p),
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=2),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 6]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumed_from_a_checkpoint_continues_bit_for_bit(name: str, same: Same) -> None:
    model = new_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(3))
    data = encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, 6))

    saved: Any = decode(data)
    resumed = new_model()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6))

    assert same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert same(resumed_optimizer.state_dict(), optimizer.state_dict())


def test_the_state_of_an_optimizer_comes_back_with_the_same_types(same: Same) -> None:
    model = new_model()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    assert same(decode(encode(optimizer.state_dict())), optimizer.state_dict())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_resumed_from_a_checkpoint_gives_the_same_rates(name: str) -> None:
    def start() -> tuple[optim.Optimizer, Any]:
        optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: optim.Optimizer, scheduler: Any, steps: range) -> list[float]:
        result = []
        for step in steps:
            optimizer.step()
            scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
            result.append(float(optimizer.param_groups[0]["lr"]))
        return result

    optimizer, scheduler = start()
    rates(optimizer, scheduler, range(4))
    data = encode([optimizer.state_dict(), scheduler.state_dict()])
    expected = rates(optimizer, scheduler, range(4, 12))

    resumed_optimizer, resumed_scheduler = start()
    saved: Any = decode(data)
    resumed_optimizer.load_state_dict(saved[0])
    resumed_scheduler.load_state_dict(saved[1])
    assert rates(resumed_optimizer, resumed_scheduler, range(4, 12)) == expected


def test_random_number_generators_go_on_where_they_were() -> None:
    python, legacy, generator = random.Random(1), np.random.RandomState(1), np.random.default_rng(1)
    torches = torch.Generator().manual_seed(1)
    python.gauss(0, 1)
    legacy.standard_normal()
    generator.integers(10, dtype=np.int32)
    torch.rand(3, generator=torches)

    def draw() -> list[object]:
        numbers = [python.random(), python.gauss(0, 1), legacy.standard_normal(), generator.standard_normal()]
        return [*numbers, torch.rand(2, generator=torches).tolist()]

    data = encode(
        {
            "python": python.getstate(),
            "legacy": legacy.get_state(),
            "legacy dict": legacy.get_state(legacy=False),
            "generator": generator.bit_generator.state,
            "torch": torches.get_state(),
        }
    )
    expected = draw()
    saved: Any = decode(data)
    for key in ("legacy", "legacy dict"):
        python.setstate(saved["python"])
        legacy.set_state(saved[key])
        generator.bit_generator.state = saved["generator"]
        torches.set_state(saved["torch"])
        assert draw() == expected
