"""Optimizers that look along a direction: conjugate gradients, which the data- and model-parallel paper found best.

They evaluate loss and gradient again on the batch of the step. So do torch's own `LBFGS` and every optimizer whose step
needs a closure. Under a strategy that exchanges gradients each evaluation is an exchange: see `thinwire.worker.search`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ConjugateGradient(torch.optim.Optimizer):
    """Nonlinear conjugate gradients by Polak and Ribière, with a line search that halves until the loss falls enough.

    Where the parameters are not as the step before left them, because an exchange moved them, it begins anew.

    Args:
        parameters: what to train.
        lr: the first step tried along a new direction.
        iterations: directions followed for each batch.
        halvings: how often a step may be halved; after that the direction is given up.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float = 1.0, *, iterations: int = 8, halvings: int = 12
    ) -> None:
        super().__init__(parameters, {"lr": lr, "iterations": iterations, "halvings": halvings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> float:  # type: ignore[override]
        """Follows a few directions; `closure` computes loss and gradients anew."""
        group = self.param_groups[0]
        held = [p for g in self.param_groups for p in g["params"]]
        memory: dict[str, Any] = self.state[held[0]]
        evaluate = torch.enable_grad()(closure)
        loss = float(evaluate())
        gradient = _flat([p.grad for p in held], held)
        here = _flat(held, held)
        if "left_at" not in memory or not torch.equal(memory["left_at"], here):
            memory.update(direction=-gradient, before=gradient.clone(), rate=float(group["lr"]))
        for _ in range(group["iterations"]):
            direction = self._direction(memory, gradient)
            slope = float(gradient @ direction)
            if slope >= 0:
                break
            loss, here, moved = self._search(memory, held, here, direction, loss, slope, evaluate, group)
            gradient = _flat([p.grad for p in held], held)
            if not moved:
                break
        memory["left_at"] = here.clone()
        return loss

    def _direction(self, memory: dict[str, Any], gradient: Tensor) -> Tensor:
        """D = −g + max(0, g·(g − g') / g'·g') d'; straight downhill where that does not go down."""
        before = memory["before"]
        share = float(gradient @ (gradient - before)) / max(1e-20, float(before @ before))
        direction: Tensor = memory["direction"] * max(0.0, share) - gradient
        if float(gradient @ direction) >= 0:
            direction = -gradient
        memory["direction"], memory["before"] = direction, gradient.clone()
        return direction

    def _search(
        self,
        memory: dict[str, Any],
        held: list[nn.Parameter],
        here: Tensor,
        direction: Tensor,
        loss: float,
        slope: float,
        evaluate: Callable[[], Any],
        group: dict[str, Any],
    ) -> tuple[float, Tensor, bool]:
        """Moves along a direction until Armijo's rule is met; back to where it was if that never happens."""
        rate = float(memory["rate"])
        for _ in range(group["halvings"]):
            there = here + rate * direction
            _put(held, there)
            found = float(evaluate())
            if found <= loss + 1e-4 * rate * slope:
                memory["rate"] = min(2 * rate, 1e3 * float(group["lr"]))
                return found, there, True
            rate /= 2
        _put(held, here)
        memory["rate"] = float(group["lr"])
        memory["direction"] = torch.zeros_like(direction)
        return float(evaluate()), here, False


def _flat(tensors: Iterable[Tensor | None], like: list[nn.Parameter]) -> Tensor:
    parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True)]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _put(held: list[nn.Parameter], vector: Tensor) -> None:
    start = 0
    for parameter in held:
        parameter.copy_(vector[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def needs_closure(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> bool:
    """Whether the step of an optimizer, or of a class of them, must be given a closure: what computes the loss again.

    >>> needs_closure(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    True
    >>> needs_closure(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    False
    """
    return bool(_required(optimizer))


def step_along(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    """Takes a step of an optimizer that needs a closure, whatever its step calls it."""
    asked = _required(optimizer)[0]
    step: Callable[..., Any] = optimizer.step
    step(**{asked.name: closure}) if asked.kind is asked.KEYWORD_ONLY else step(closure)


def _required(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asked = list(inspect.signature(optimizer.step).parameters.values())
    inner = inspect.unwrap(optimizer.step, stop=inspect.ismethod)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not inspect.ismethod(inner) and inner is inspect.unwrap(kind.step):
        asked = asked[1:]  # torch's schedulers put a function around the method: its first argument is the optimizer
    return [each for each in asked if each.default is each.empty and each.kind not in variable]
