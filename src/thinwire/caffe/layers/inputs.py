"""Layers without bottoms: what a net is called with, and what it makes up itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.caffe.blobs import MAX_ELEMENTS
from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, layer
from thinwire.errors import ConfigError


class InputLayer(Layer):
    """Tops that the caller gives. `shapes` holds those that the prototxt tells, as far as it tells them."""

    bottoms = (0, 0)
    tops = (1, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.shapes: tuple[Shape | None, ...] = tuple(self._shapes(spec))

    def _shapes(self, spec: Any) -> Sequence[Shape | None]:
        return [None] * len(spec.top)


@layer("Input")
class Input(InputLayer):
    def _shapes(self, spec: Any) -> Sequence[Shape | None]:
        shapes = [tuple(int(d) for d in shape.dim) for shape in spec.input_param.shape]
        if any(d < 1 for shape in shapes for d in shape):
            raise ConfigError(f"input shapes {shapes} are not possible; every size is at least 1")
        if not shapes:
            return [None] * len(spec.top)
        if len(shapes) not in (1, len(spec.top)):
            raise ConfigError(f"{len(shapes)} shapes are given for {len(spec.top)} tops; give one, or one each")
        return shapes * len(spec.top) if len(shapes) == 1 else shapes


@layer("MemoryData")
class MemoryData(InputLayer):
    tops = (2, 2)

    def _shapes(self, spec: Any) -> Sequence[Shape | None]:
        given = spec.memory_data_param
        data = (given.batch_size, given.channels, given.height, given.width)
        if min(data) < 1:
            raise ConfigError("memory_data_param needs batch_size, channels, height and width of at least 1")
        return [data, (given.batch_size,)]


@layer("Data")
@layer("ImageData")
@layer("WindowData")
@layer("HDF5Data")
class Data(InputLayer):
    """Rows from elsewhere: shapes come with the rows, see `thinwire.caffe.sources`."""


@layer("DummyData")
class DummyData(Layer):
    """Blobs made by fillers: constants once, others drawn at every call."""

    where: Tensor

    bottoms = (0, 0)
    tops = (1, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given, number = spec.dummy_data_param, len(spec.top)
        if given.shape:
            shapes = [tuple(int(d) for d in shape.dim) for shape in given.shape]
        else:
            sides = [list(side) for side in (given.num, given.channels, given.height, given.width)]
            if any(len(side) not in (1, number) for side in sides):
                raise ConfigError("num, channels, height and width are each given once, or once for every top")
            sides = [side * number if len(side) == 1 else side for side in sides]
            shapes = [tuple(int(d) for d in shape) for shape in zip(*sides, strict=True)]
        if any(d < 1 for s in shapes for d in s) or any(math.prod(s) > MAX_ELEMENTS for s in shapes):
            raise ConfigError(
                f"shapes {shapes} are not possible; sizes are at least 1 and blobs at most {MAX_ELEMENTS:,}"
            )
        fillers = [_filler(f) for f in given.data_filler] or [Filler()]
        if len(shapes) not in (1, number) or len(fillers) not in (1, number):
            raise ConfigError(
                f"{len(shapes)} shapes and {len(fillers)} fillers for {number} tops; give one, or one each"
            )
        self.shapes = shapes * number if len(shapes) == 1 else shapes
        self._fillers = fillers * number if len(fillers) == 1 else fillers
        self.register_buffer("where", torch.zeros(0), persistent=False)

    def forward(self) -> Any:
        found = tuple(torch.empty(shape, device=self.where.device) for shape in self.shapes)
        for blob, filler in zip(found, self._fillers, strict=True):
            filler.fill(blob)
        return found if len(found) > 1 else found[0]

    def infer(self, *bottoms: Tensor) -> Any:
        found = tuple(torch.empty(shape, device="meta") for shape in self.shapes)
        return found if len(found) > 1 else found[0]


def _filler(given: Any) -> Filler:
    from thinwire.caffe import schema

    return Filler.of(schema.message("BiasParameter")(filler=given), "filler")
