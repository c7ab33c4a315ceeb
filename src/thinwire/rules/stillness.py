"""Stretches of the model that nobody has moved: codecs that send a sign for every value know no zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CELL = 16
"""Elements that are looked at together; parameters begin at multiples of as many."""
MOST, SHARE = 4, 64
"""So many stretches a contribution tells of, the longest, each at least one of so many parts of it: telling is not to
cost as much as what is told of."""

Stretch = tuple[int, int]


def still(values: Tensor, start: int = 0) -> list[Stretch]:
    """The longest stretches of whole cells that are zero throughout, `values` beginning at `start`; short ones are not
    worth their place.

    >>> still(torch.cat([torch.zeros(32), torch.ones(16), torch.zeros(8)]), 100)
    [(100, 132), (148, 156)]
    """
    short = -values.numel() % CELL
    cells = torch.nn.functional.pad(values, (0, short)).view(-1, CELL)
    moved = torch.nn.functional.pad((cells != 0).any(1), (1, 1), value=True)
    edges = (moved[1:] != moved[:-1]).nonzero().flatten().tolist()
    found = [
        (start + CELL * a, start + min(CELL * b, values.numel())) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
    found = [(a, b) for a, b in found if SHARE * (b - a) >= values.numel()]
    return sorted(sorted(found, key=lambda stretch: stretch[0] - stretch[1])[:MOST])


def common(said: Sequence[Sequence[Stretch]]) -> list[Stretch]:
    """What lies in a stretch of everybody's.

    >>> common([[(0, 32), (64, 96)], [(16, 80)]])
    [(16, 32), (64, 80)]
    >>> common([])
    []
    """
    found = list(said[0]) if said else []
    for other in said[1:]:
        both = [(max(a, c), min(b, d)) for a, b in found for c, d in other]
        found = [(a, b) for a, b in both if a < b]
    return found
