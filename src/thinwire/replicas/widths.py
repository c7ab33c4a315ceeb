"""How a step is computed: in pieces, in narrow numbers, with a loss that is scaled, compiled.

Trainable parameters of bfloat16 or float16 are kept in float32, as one vector with all others: steps smaller than a
narrow number can hold are not lost. What a forward pass sees of them is rounded, and their gradients are float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.replicas.calls import called_under

NARROW = (torch.bfloat16, torch.float16)
FIRST_SCALE, MOST_SCALE = 65536.0, 2.0**24
GROWS_AFTER = 2000
"""Steps without an overflow after which a float16 loss is scaled by twice as much; as torch's GradScaler has it."""


class Narrowed(nn.Module):
    """A network whose parameters are float32, called with some of them rounded to what they were made as."""

    def __init__(self, module: nn.Module, types: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self._orig_mod, self._types = module, dict(types)

    def forward(self, *given: Any, **named: Any) -> Any:
        own = dict(self._orig_mod.named_parameters())
        rounded = {name: own[name].to(kind) for name, kind in self._types.items()}
        return called_under(self._orig_mod, rounded, given, named)


def rounded(values: Mapping[str, Tensor], types: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Parameters by name, those of narrow types rounded to them."""
    return {name: value.to(types[name]) if name in types else value for name, value in values.items()}


def pieces_of(batch: Any, count: int) -> list[Any]:
    """A batch's rows in so many batches of nearly equal size; fewer where there are fewer rows."""
    if count <= 1 or batch.num_rows <= 1:
        return [batch]
    count = min(count, batch.num_rows)
    borders = [round(piece * batch.num_rows / count) for piece in range(count + 1)]
    found = []
    for start, stop in itertools.pairwise(borders):
        cut = [None if t is None else t[start:stop] for t in (batch.label, batch.weight)]
        inputs = tuple(t[start:stop] for t in batch.inputs)
        found.append(batch._replace(inputs=inputs, label=cut[0], weight=cut[1], num_rows=stop - start))
    return found


def unscale(gradients: Sequence[Tensor], scale: float) -> bool:
    """Divides gradients by a scale in place; returns whether all are finite."""
    if not gradients:
        return True
    device = gradients[0].device
    bad, inverse = torch.zeros(1, device=device), torch.full((1,), 1.0 / scale, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), bad, inverse)
    return not bool(bad.item())


class Scale:
    """By how much a float16 loss is scaled before its gradient is taken; kept in a replica's memory.

    An overflow halves it, and the same batch is computed again at once, so that no step is left out.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self._memory = memory

    @property
    def value(self) -> float:
        return float(self._memory.get("scale", FIRST_SCALE))

    def overflowed(self) -> bool:
        """Halves the scale; returns whether there is any left to try."""
        self._memory["scale"], self._memory["scaled_steps"] = self.value / 2, 0
        return self.value >= 1.0

    def held(self) -> None:
        """Counts a step without an overflow."""
        steps = int(self._memory.get("scaled_steps", 0)) + 1
        if steps >= GROWS_AFTER:
            self._memory["scale"], steps = min(2 * self.value, MOST_SCALE), 0
        self._memory["scaled_steps"] = steps
