"""Parameters that every member of a group has all of, and each owns a share of.

The owner of a share gets its gradient summed over the group, steps it, and speaks for it between replicas; before the
next step the others get it from there. That moves what averaging gradients moves, while the optimizer's state and the
joint model are held once in a group. Both ways go on while layers compute: gradients leave as soon as they are made,
and a layer waits for its own parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.placement.crew import Crew, Pending, bounds
from thinwire.placement.moves import added
from thinwire.placement.portions import Portion

BUCKET = 1 << 20
"""Elements after which another bucket is begun."""


class Bucket:
    """Some parameters, side by side."""

    def __init__(self, crew: Crew, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._crew, self.names = crew, [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._offsets, total = [], 0
        for parameter in self.parameters:
            self._offsets.append(total)
            total += parameter.numel()
        first = self.parameters[0]
        self._borders = bounds(total, crew.size)
        self._widths = [b - a for a, b in zip(self._borders[:-1], self._borders[1:], strict=True)]
        self._full = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            parameter.data = self._full[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        self.own = nn.Parameter(self._full[self._span()].clone(), first.requires_grad)
        self._coming: Pending | None = None
        self._leaving: Pending | None = None
        self._missing = len(self.parameters)

    def _span(self) -> slice:
        return slice(self._borders[self._crew.part], self._borders[self._crew.part + 1])

    def portions(self) -> list[tuple[Portion, slice]]:
        """What of the whole network the own share is, piece by piece of it."""
        start, stop = self._borders[self._crew.part], self._borders[self._crew.part + 1]
        found = []
        for name, parameter, offset in zip(self.names, self.parameters, self._offsets, strict=True):
            a, b = max(start, offset), min(stop, offset + parameter.numel())
            if a < b:
                portion = Portion(name, tuple(parameter.shape), None, ((a - offset, b - offset),))
                found.append((portion, slice(a - start, b - start)))
        return found

    # -- parameters -------------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Sends the own share to the others, and begins to receive theirs."""
        self._missing = len(self.parameters)
        if self._crew.size > 1:
            shapes, lies = [[width] for width in self._widths], torch.split(self._full, self._widths)
            self._coming = self._crew.start([self.own.data] * self._crew.size, shapes, lies)
        else:
            self._full.copy_(self.own.data)

    def ready(self) -> None:
        """Waits for the others' shares."""
        if self._coming is not None:
            pending, self._coming = self._coming, None
            pending.wait()

    # -- gradients --------------------------------------------------------------------------------------------------

    def _made(self, parameter: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._leave()

    def _leave(self) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        for parameter in self.parameters:
            parameter.grad = None
        width = self._widths[self._crew.part]
        self._leaving = self._crew.start(list(torch.split(flat, self._widths)), [[width]] * self._crew.size)

    def settle(self) -> None:
        """Waits for the own share's gradient; parameters that had no part in the loss count as zero."""
        if self._leaving is None:
            self._leave()
        assert self._leaving is not None
        pending, self._leaving = self._leaving, None
        self.own.grad = added(pending.wait())


def buckets(crew: Crew, named: Sequence[tuple[str, nn.Parameter]], size: int = BUCKET) -> list[Bucket]:
    """Parameters in buckets, the last ones first: their gradients are made first."""
    found: list[Bucket] = []
    group: list[tuple[str, nn.Parameter]] = []
    for name, parameter in reversed(named):
        group.append((name, parameter))
        if sum(p.numel() for _, p in group) >= size:
            found.append(Bucket(crew, group))
            group = []
    if group:
        found.append(Bucket(crew, group))
    return found
