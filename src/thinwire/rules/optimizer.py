"""Any element-wise torch optimizer as a pure rule: new parameters and state from old ones and a gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError

Factory = Callable[[Any], torch.optim.Optimizer]
STEP = "step"
_own = threading.local()


def slots(factory: Factory) -> tuple[str, ...]:
    """The names of the tensors that an optimizer keeps beside a parameter, each as long as the parameter.

    >>> slots(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    ('momentum_buffer',)
    >>> slots(lambda p: torch.optim.Adam(p))
    ('exp_avg', 'exp_avg_sq')

    An optimizer that keeps another number than a count of its steps is refused: its state cannot be cut into tuples.
    """
    probe = nn.Parameter(torch.ones(3))
    optimizer = factory([probe])
    probe.grad = torch.ones(3)
    optimizer.step()
    found = []
    for name, value in optimizer.state[probe].items():
        if isinstance(value, Tensor) and value.shape == probe.shape:
            found.append(name)
        elif name != STEP and value is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r}, which is no tensor as long as its parameter; at table "
                "servers use an optimizer such as SGD, Adam, AdamW, Adagrad or RMSprop"
            )
    return tuple(found)


def step(
    factory: Factory,
    names: Sequence[str],
    model: Tensor,
    state: Sequence[Tensor],
    gradient: Tensor,
    steps: int,
    rate: float | None,
) -> tuple[Tensor, list[Tensor]]:
    """One step of an optimizer that has made so many: the new parameters, and its new state.

    >>> step(lambda p: torch.optim.SGD(p, lr=0.5), (), torch.tensor([3.0]), (), torch.tensor([2.0]), 0, None)
    (tensor([2.]), [])

    Downpour SGD (Dean et al. 2012) with the optimizer at the server; SINGA (Wang et al. 2015), Algorithm 3, line 8.
    """
    parameter, optimizer, first = _optimizer(factory)
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    parameter.data = model.clone()
    parameter.grad = gradient
    optimizer.state.clear()
    if steps:
        kept = {name: value.clone() for name, value in zip(names, state, strict=True)}
        optimizer.state[parameter] = {STEP: torch.tensor(float(steps)), **kept}
    elif first:  # what some make before their first step
        optimizer.state[parameter] = {
            n: v.expand(model.shape).clone() if v.dim() else v.clone() for n, v in first.items()
        }
    optimizer.step()
    found = optimizer.state[parameter]
    moved = [found[name] if isinstance(found.get(name), Tensor) else torch.zeros_like(model) for name in names]
    return parameter.data, moved


def _optimizer(factory: Factory) -> tuple[nn.Parameter, torch.optim.Optimizer, dict[str, Tensor]]:
    """This thread's own, since making one takes longer than its step; and the state it has before any."""
    known: dict[Factory, tuple[nn.Parameter, torch.optim.Optimizer, dict[str, Tensor]]]
    known = _own.__dict__.setdefault("made", {})
    if factory not in known:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = factory([parameter])
        known[factory] = (parameter, optimizer, dict(optimizer.state.get(parameter, {})))
    return known[factory]
