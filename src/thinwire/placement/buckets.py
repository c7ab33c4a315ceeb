"""Buckets of parameters of which every member has a full copy and owns a share.

The owner of a share gets its gradient summed over the group, steps it, and exchanges it with other replicas. Before the
next step the other members get the share from its owner. This moves as many bytes as averaging gradients, while the
optimizer's state and the joint model exist only once in a group. Both transfers overlap with computation: gradients are
sent as soon as they are ready, and a layer waits only for its own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.placement.crew import Crew, Pending, bounds
from thinwire.placement.moves import added
from thinwire.placement.portions import Portion

BUCKET = 1 << 20
"""Elements after which a new bucket begins."""


class Bucket:
    """Some parameters, stored contiguously."""

    def __init__(self, crew: Crew, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._crew, self.names = crew, [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._offsets, total = [], 0
        for parameter in self.parameters:
            self._offsets.append(total)
            total += parameter.numel()
        self._borders = bounds(total, crew.size)
        self._widths = [b - a for a, b in zip(self._borders[:-1], self._borders[1:], strict=True)]
        self._full = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            parameter.data = self._full[offset : offset + parameter.numel()].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        self._had = [True] * len(self.parameters)
        """Which parameters have a gradient; the same on all members, which run the same network."""
        self._pieces = self._owned()
        self.own = [nn.Parameter(self._lies()[a:b].clone()) for _, a, b in self._pieces]
        """The member's own share, split by parameter: an optimizer may treat each parameter differently."""
        self._coming: Pending | None = None
        self._leaving: Pending | None = None
        self._missing = len(self.parameters)

    def _lies(self) -> Tensor:
        """The view of the own share in the full vector."""
        return self._full[self._borders[self._crew.part] : self._borders[self._crew.part + 1]]

    def _owned(self) -> list[tuple[int, int, int]]:
        """The pieces of the own share: for each, the parameter's index, and its start and end in the share."""
        start, stop = self._borders[self._crew.part], self._borders[self._crew.part + 1]
        found = []
        for index, (parameter, offset) in enumerate(zip(self.parameters, self._offsets, strict=True)):
            a, b = max(start, offset), min(stop, offset + parameter.numel())
            if a < b:
                found.append((index, a - start, b - start))
        return found

    def portions(self) -> list[tuple[Portion, nn.Parameter]]:
        """The pieces of the own share, as portions of the whole network."""
        start, found = self._borders[self._crew.part], []
        for (index, a, b), own in zip(self._pieces, self.own, strict=True):
            offset, shape = start - self._offsets[index], tuple(self.parameters[index].shape)
            found.append((Portion(self.names[index], shape, None, ((a + offset, b + offset),)), own))
        return found

    # -- parameters -------------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Sends the own share to the other members, and begins to receive theirs."""
        self._missing, lies = len(self.parameters), self._lies()
        for (_, a, b), own in zip(self._pieces, self.own, strict=True):
            lies[a:b].copy_(own.data)
        if self._crew.size > 1:
            shapes, into = [[width] for width in self._widths], torch.split(self._full, self._widths)
            self._coming = self._crew.start([lies] * self._crew.size, shapes, into)

    def ready(self) -> None:
        """Waits for the other members' shares."""
        if self._coming is not None:
            pending, self._coming = self._coming, None
            pending.wait()

    # -- gradients --------------------------------------------------------------------------------------------------

    def _made(self, parameter: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._leave()

    def _leave(self) -> None:
        self._had = [p.grad is not None for p in self.parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        for parameter in self.parameters:
            parameter.grad = None
        width = self._widths[self._crew.part]
        self._leaving = self._crew.start(list(torch.split(flat, self._widths)), [[width]] * self._crew.size)

    def settle(self) -> None:
        """Waits for the own share's gradient; parameters that do not contribute to the loss get none."""
        if self._leaving is None:
            self._leave()
        assert self._leaving is not None
        pending, self._leaving = self._leaving, None
        total = added(pending.wait())
        for (index, a, b), own in zip(self._pieces, self.own, strict=True):
            own.grad = total[a:b] if self._had[index] else None


def buckets(crew: Crew, named: Sequence[tuple[str, nn.Parameter]], size: int = BUCKET) -> list[Bucket]:
    """Parameters in buckets, the last parameters first: their gradients are ready first."""
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
