"""Layouts of activations on a group, and redistribution of activations and their gradients between layouts.

In the layout "rows" each member has all features of its own rows; in "features", its share of the features of all rows;
in "full", everything; in "sum", a term of everything, still to be added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.placement.crew import Crew

ROWS, FEATURES = "rows", "features"
ADDED = "added"
_SPLIT_AND_JOIN: dict[tuple[str, str], tuple[str | None, str]] = {
    ("rows", "full"): (None, ROWS),
    ("features", "full"): (None, FEATURES),
    ("rows", "features"): (FEATURES, ROWS),
    ("features", "rows"): (ROWS, FEATURES),
    ("sum", "rows"): (ROWS, ADDED),
    ("sum", "features"): (FEATURES, ADDED),
}
"""By layout before and after: the dimension along which a tensor is split, and how received pieces are joined."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of rows and features in a tensor, and the borders of each member's features."""

    batch_dim: int
    feature_dim: int
    borders: tuple[int, ...]

    def width(self, part: int) -> int:
        return self.borders[part + 1] - self.borders[part]


def redistribute(crew: Crew, x: Tensor, shape: Shape, before: str, after: str) -> Tensor:
    """Redistributes a tensor from one layout to another."""
    cut, join = _SPLIT_AND_JOIN[before, after]
    me, total = crew.part, sum(crew.rows)
    each = x.shape[shape.batch_dim] // (crew.rows[me] if before == "rows" else total)
    rows = [count * each for count in crew.rows]
    widths = [shape.width(part) for part in range(crew.size)]
    if cut is None:
        pieces = [x] * crew.size
    else:
        dim, sizes = (shape.batch_dim, rows) if cut == ROWS else (shape.feature_dim, widths)
        pieces = list(torch.split(x, sizes, dim))
    shapes = []
    for part in range(crew.size):
        own = list(pieces[me].shape)
        if join == ROWS:
            own[shape.batch_dim] = rows[part]
        elif join == FEATURES:
            own[shape.feature_dim] = widths[part]
        shapes.append(own)
    if join == ADDED:
        return added(crew.hand(pieces, shapes))
    dim, sizes = (shape.batch_dim, rows) if join == ROWS else (shape.feature_dim, widths)
    if dim:
        return torch.cat(crew.hand(pieces, shapes), dim)
    whole = x.new_empty(sum(sizes), *shapes[me][1:])
    crew.hand(pieces, shapes, torch.split(whole, sizes))
    return whole


def added(pieces: Sequence[Tensor]) -> Tensor:
    """The sum of the pieces, in the order of the members."""
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total


_BACK = {
    ("rows", "full"): ("sum", "rows"),
    ("features", "full"): ("sum", "features"),
    ("rows", "features"): ("features", "rows"),
    ("features", "rows"): ("rows", "features"),
    ("sum", "rows"): ("rows", "full"),
}


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crew: Crew, shape: Shape, before: str, after: str) -> Tensor:
        ctx.crew, ctx.shape, ctx.back = crew, shape, _BACK[before, after]
        return redistribute(crew, x.contiguous(), shape, before, after)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return redistribute(ctx.crew, gradients[0].contiguous(), ctx.shape, *ctx.back), None, None, None, None


class Move(nn.Module):
    """Redistributes activations between two layers."""

    def __init__(self, crew: Crew, shape: Shape, before: str, after: str) -> None:
        super().__init__()
        self._crew, self._shape, self._ways = crew, shape, (before, after)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = _Redistributed.apply(x, self._crew, self._shape, *self._ways)  # type: ignore[no-untyped-call]
        return moved

    def extra_repr(self) -> str:
        return " to ".join(self._ways)


class _AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crew: Crew) -> Tensor:
        ctx.crew = crew
        return _all_reduce(crew, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_reduce(ctx.crew, gradients[0]), None


def _all_reduce(crew: Crew, x: Tensor) -> Tensor:
    return added(crew.hand([x.contiguous()] * crew.size, [x.shape] * crew.size))


class Total:
    """The sum of a tensor over the members, on all of them; the gradients are summed in the same way."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = _AllReduced.apply(x, self._crew)  # type: ignore[no-untyped-call]
        return found
