"""Portions of a network's tensors that members of a group hold, and the whole tensors assembled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.errors import CheckpointError


class Portion(NamedTuple):
    """A part of one tensor: consecutive ranges of one dimension, or of the flattened tensor."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    """None counts in the flattened tensor."""
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, whole: Tensor) -> Tensor:
        """A copy of this portion of a whole tensor."""
        flat, dim = (whole.reshape(-1), 0) if self.dim is None else (whole, self.dim)
        return torch.cat([flat.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Writes this portion into a whole tensor."""
        flat, dim = (whole.view(-1), 0) if self.dim is None else (whole, self.dim)
        part, at = part.reshape(-1) if self.dim is None else part, 0
        for start, stop in self.ranges:
            flat.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dim": self.dim,
            "ranges": [list(each) for each in self.ranges],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Portion:
        dim = None if values["dim"] is None else int(values["dim"])
        ranges = tuple((int(a), int(b)) for a, b in values["ranges"])
        return cls(str(values["name"]), tuple(int(s) for s in values["shape"]), dim, ranges)


def whole(name: str, tensor: Tensor) -> Portion:
    """The portion that is all of a tensor."""
    return Portion(name, tuple(tensor.shape), None, ((0, tensor.numel()),))


def assembled(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The whole tensors, from the states of a group's members: portions and tensors in the same order.

    Raises CheckpointError where a portion is missing.
    """
    found: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for state in states:
        for values, part in zip(state["portions"], state["tensors"], strict=True):
            portion = Portion.from_json(values)
            target = found.setdefault(portion.name, torch.zeros(portion.shape, dtype=part.dtype))
            portion.put(target, part)
            filled[portion.name] = filled.get(portion.name, 0) + part.numel()
    lacking = [name for name, count in filled.items() if count < found[name].numel()]
    if lacking:
        raise CheckpointError(
            f"the parts of a replica do not make a whole: {lacking[0]!r} lacks some of its values; use the parts of "
            "all members"
        )
    return found
