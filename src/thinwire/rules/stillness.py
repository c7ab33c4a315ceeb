"""Stretches of the model that nobody has moved: codecs that send a sign for every value know no zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CELL = 16
"""Elements that are looked at together; parameters begin at multiples of as many."""
MOST = 64
"""Stretches of which a contribution tells, the longest."""

Stretch = tuple[int, int]


def still(values: Tensor, start: int = 0) -> list[Stretch]:
    """The longest stretches of whole cells that are zero throughout, `values` beginning at `start`.

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
    longest = sorted(found, key=lambda stretch: stretch[0] - stretch[1])[:MOST]
    return sorted(longest)


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
