"""Layers that only move numbers: joining, splitting, reshaping, choosing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from thinwire.caffe.layers.base import Layer, axis_of, layer
from thinwire.errors import ConfigError


@layer("Concat")
class Concat(Layer):
    bottoms = (1, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.concat_param
        self.axis = given.concat_dim if given.HasField("concat_dim") else given.axis

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, axis_of(self.axis, bottoms[0].dim()))


@layer("Slice")
class Slice(Layer):
    tops = (1, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.slice_param
        self.axis = given.slice_dim if given.HasField("slice_dim") else given.axis
        self.points = tuple(given.slice_point)
        if self.points and len(self.points) != self.num_tops - 1:
            raise ConfigError(
                f"{len(self.points)} slice_points make {len(self.points) + 1} tops, and it has {self.num_tops}"
            )

    def forward(self, x: Tensor) -> Any:
        axis = axis_of(self.axis, x.dim())
        size = x.shape[axis]
        if not self.points and size % self.num_tops:
            raise ConfigError(
                f"axis {axis} of {size} does not divide into {self.num_tops} equal tops; give slice_point"
            )
        each = size // self.num_tops
        points = [0, *(self.points or range(each, size, each)), size]
        sizes = [b - a for a, b in itertools.pairwise(points)]
        if any(s < 1 for s in sizes):
            raise ConfigError(f"slice_points {self.points} do not rise within {size}")
        return torch.split(x, sizes, axis) if len(sizes) > 1 else x


@layer("Split")
class Split(Layer):
    tops = (1, math.inf)

    def forward(self, x: Tensor) -> Any:
        return (x,) * self.num_tops if self.num_tops > 1 else x


@layer("Silence")
class Silence(Layer):
    bottoms = (1, math.inf)
    tops = (0, 0)

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return ()


@layer("HDF5Output")
class HDF5Output(Silence):
    """What Caffe would write is in the net's blobs."""


@layer("Flatten")
class Flatten(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.first, self.last = spec.flatten_param.axis, spec.flatten_param.end_axis

    def forward(self, x: Tensor) -> Tensor:
        first, last = axis_of(self.first, x.dim()), axis_of(self.last, x.dim())
        if last < first:
            raise ConfigError(f"flatten_param: axis {first} comes after end_axis {last}")
        return x.flatten(first, last)


@layer("Reshape")
class Reshape(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.reshape_param
        self.dims, self.axis, self.num_axes = tuple(given.shape.dim), given.axis, given.num_axes
        if self.dims.count(-1) > 1 or any(d < -1 for d in self.dims):
            raise ConfigError(
                f"reshape_param.shape {self.dims}: a size is 0 (as it was), -1 (once: the rest) or positive"
            )

    def forward(self, x: Tensor) -> Tensor:
        dims = x.dim()
        first = self.axis if self.axis >= 0 else dims + self.axis + 1
        last = dims if self.num_axes == -1 else first + self.num_axes
        if not 0 <= first <= last <= dims:
            raise ConfigError(f"axes {first} to {last} are not among the {dims} of its bottom")
        before, after = x.shape[:first], x.shape[last:]
        sizes = []
        for index, size in enumerate(self.dims):
            if size == 0 and first + index >= dims:
                raise ConfigError(f"size {index} of {self.dims} is to stay as it was, and its bottom has none there")
            sizes.append(x.shape[first + index] if size == 0 else size)
        return x.reshape(*before, *sizes, *after)


@layer("Permute")
class Permute(Layer):
    """Axes in another order, of the SSD branch."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.order = tuple(spec.permute_param.order)

    def forward(self, x: Tensor) -> Tensor:
        order = (*self.order, *(axis for axis in range(x.dim()) if axis not in self.order))
        return x.permute(order)


@layer("Tile")
class Tile(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.axis, self.tiles = spec.tile_param.axis, spec.tile_param.tiles
        if self.tiles < 1:
            raise ConfigError(f"tiles = {self.tiles} is not possible; at least 1")

    def forward(self, x: Tensor) -> Tensor:
        times = [1] * x.dim()
        times[axis_of(self.axis, x.dim())] = self.tiles
        return x.repeat(times)


@layer("BatchReindex")
class BatchReindex(Layer):
    bottoms = (2, 2)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x[chosen.long()]


@layer("Filter")
class Filter(Layer):
    """Keeps the rows where the last bottom is not zero."""

    bottoms = (2, math.inf)
    tops = (1, math.inf)

    def forward(self, *bottoms: Tensor) -> Any:
        *kept, chosen = bottoms
        rows = chosen.flatten().nonzero().flatten()
        tops = tuple(x[rows] for x in kept)
        return tops if len(tops) > 1 else tops[0]

    def infer(self, *bottoms: Tensor) -> Any:
        return bottoms[:-1] if len(bottoms) > 2 else bottoms[0]


@layer("ArgMax")
class ArgMax(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.argmax_param
        self.axis = given.axis if given.HasField("axis") else None
        self.values, self.top_k = given.out_max_val, given.top_k
        if self.top_k < 1:
            raise ConfigError(f"top_k = {self.top_k} is not possible; at least 1")

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is not None:
            values, places = self._best(x, axis_of(self.axis, x.dim()))
            return values if self.values else places.to(x.dtype)
        values, places = (found[:, None] for found in self._best(x.reshape(len(x), -1), 1))
        both = torch.cat([places.to(x.dtype), values], 1) if self.values else places.to(x.dtype)
        return both if x.dim() <= 3 else both.view(*both.shape, *[1] * (x.dim() - 3))

    def _best(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """The largest numbers and their places; of equal ones the later first, as Caffe sorts pairs."""
        if self.top_k > x.shape[axis]:
            raise ConfigError(f"top_k = {self.top_k} of {x.shape[axis]} is not possible")
        values, places = x.flip(axis).sort(dim=axis, descending=True, stable=True)
        return values.narrow(axis, 0, self.top_k), x.shape[axis] - 1 - places.narrow(axis, 0, self.top_k)
