"""What of a replica is NaN or infinite: a step's loss or gradient, or what an optimizer has learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from thinwire.rules.finite import are_finite, count_not_finite


class Flaw(NamedTuple):
    """Something of a step that is not finite."""

    what: str
    values: int
    step: int
    loss: float = 0.0

    def __str__(self) -> str:
        if self.what == "loss":
            return f"the loss became {self.loss} at step {self.step}"
        values = "1 value" if self.values == 1 else f"{self.values} values"
        return f"{values} of the {self.what} became NaN or infinite at step {self.step}"


def flaw_of(step: int, loss: float, parameters: Sequence[Tensor]) -> Flaw | None:
    """What of a step's loss, and of its gradients as the parameters have them, is not finite.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([float("inf"), 1.0])
    >>> print(flaw_of(3, 0.5, [weight]))
    1 value of the gradient became NaN or infinite at step 3
    >>> print(flaw_of(3, float("nan"), [weight]))
    the loss became nan at step 3
    """
    if not math.isfinite(loss):
        return Flaw("loss", 1, step, loss)
    gradients = [p.grad for p in parameters if p.grad is not None]
    made = [g._values() if g.is_sparse else g for g in gradients]
    return None if are_finite(made) else Flaw("gradient", sum(map(count_not_finite, made)), step)


def forget_not_finite(optimizer: Optimizer) -> int:
    """Forgets what an optimizer has learnt of a parameter where that is not finite; returns how many values.

    Single numbers are not looked at: they may be infinite by design.
    """
    found = 0
    for parameter in list(optimizer.state):
        learnt = [v for v in _tensors(optimizer.state[parameter]) if v.dim() or v.shape == parameter.shape]
        if not are_finite(learnt):
            found += sum(map(count_not_finite, learnt))
            del optimizer.state[parameter]
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    """Real tensors in a state, in lists of it too: LBFGS keeps directions in one."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)
