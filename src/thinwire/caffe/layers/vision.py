"""Layers of images: convolution both ways, pooling, local response normalisation and their kin."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.caffe import schema
from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, axis_of, enum, layer
from thinwire.caffe.layers.windows import (
    Windows,
    average_pooled,
    convolution_windows,
    framed,
    max_pooled,
    pooled_sizes,
    pooling_windows,
)
from thinwire.errors import ConfigError

_CONVOLUTIONS: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Windowed(Layer, ABC):
    """What convolution and its transpose have in common."""

    blobs = ("weight", "bias")
    bottoms = (1, math.inf)
    tops = (1, math.inf)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        if len(spec.bottom) != len(spec.top):
            raise ConfigError(f"it has {len(spec.bottom)} bottoms and {len(spec.top)} tops; it takes as many of both")
        given = spec.convolution_param
        if given.num_output < 1 or given.group < 1 or given.num_output % given.group:
            raise ConfigError(
                f"num_output = {given.num_output} with group = {given.group} is not possible; "
                "num_output is a positive multiple of group"
            )
        self.axis = given.axis
        self._given = given.SerializeToString()
        self.num_output, self.group = int(given.num_output), int(given.group)
        self.kept = self.blobs if given.bias_term else self.blobs[:1]
        self._fillers = [Filler.of(given, "weight_filler"), Filler.of(given, "bias_filler")]
        self._windows: dict[int, Windows] = {}

    def windows(self, axes: int) -> Windows:
        if axes not in self._windows:
            if axes and axes not in _CONVOLUTIONS:
                raise ConfigError(f"its bottom has {axes} spatial axes; up to 3 are supported")
            given = schema.message("ConvolutionParameter").FromString(self._given)
            self._windows[axes] = convolution_windows(given, axes)
        return self._windows[axes]

    def _channels(self, shape: Shape) -> int:
        axis = axis_of(self.axis, len(shape))
        if not axis or shape[axis] % self.group:
            raise ConfigError(
                f"its bottom has the shape {shape}; it takes (N, C, …) with C a multiple of group = {self.group}"
            )
        return shape[axis]

    def _kernel(self, shape: Shape) -> tuple[int, ...]:
        return self.windows(len(shape) - axis_of(self.axis, len(shape)) - 1).kernel

    def implied_bottoms(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        channels = shapes[0][0] if isinstance(self, Deconvolution) else shapes[0][1] * self.group
        before = self.axis if self.axis > 0 else 1
        return [(*[1] * before, channels, *[1] * (len(shapes[0]) - 2))]

    def fillers(self) -> Sequence[Filler]:
        return self._fillers[: len(self.kept)]

    def forward(self, *bottoms: Tensor) -> Any:
        bias = self.blob(1) if len(self.kept) > 1 else None
        tops = tuple(self._folded(x, bias) for x in bottoms)
        return tops if len(tops) > 1 else tops[0]

    def _folded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """All axes before the channels taken as one, of rows; without a spatial axis, one of size 1 for the time."""
        axis = axis_of(self.axis, x.dim())
        rows = x.flatten(0, axis - 1)
        found = self._apply_to(rows if rows.dim() > 2 else rows[..., None], bias)
        found = found if rows.dim() > 2 else found[..., 0]
        return found.reshape(*x.shape[:axis], *found.shape[1:]) if axis > 1 else found

    def _weight(self, axes: int) -> Tensor:
        weight = self.blob(0)
        return weight if weight.dim() == axes + 2 else weight[..., None]

    @abstractmethod
    def _apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The top of rows with channels on their second axis."""


@layer("Convolution")
class Convolution(_Windowed):
    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        channels = self._channels(bottoms[0])
        kernel = self._kernel(bottoms[0])
        return [(self.num_output, channels // self.group, *kernel), (self.num_output,)][: len(self.kept)]

    def _apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        axes = x.dim() - 2
        windows = self.windows(axes) if self.blob(0).dim() > 2 else Windows((1,), (1,), (0,), (1,))
        found: Tensor = _CONVOLUTIONS[axes](
            x, self._weight(axes), bias, windows.stride, windows.pad, windows.dilation, self.group
        )
        return found


@layer("Deconvolution")
class Deconvolution(_Windowed):
    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        channels = self._channels(bottoms[0])
        kernel = self._kernel(bottoms[0])
        return [(channels, self.num_output // self.group, *kernel), (self.num_output,)][: len(self.kept)]

    def _apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        axes = x.dim() - 2
        windows = self.windows(axes) if self.blob(0).dim() > 2 else Windows((1,), (1,), (0,), (1,))
        found: Tensor = _TRANSPOSED[axes](
            x, self._weight(axes), bias, windows.stride, windows.pad, 0, self.group, windows.dilation
        )
        return found


@layer("Im2col")
class Im2col(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.windows = convolution_windows(spec.convolution_param, 2)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, pad, dilation = self.windows
        columns = F.unfold(x, kernel, dilation, pad, stride)
        tall = (x.shape[2] + 2 * pad[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
        return columns.view(*columns.shape[:2], tall, -1)


@layer("Pooling")
class Pooling(Layer):
    tops = (1, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self._given = spec.pooling_param.SerializeToString()
        self.method = enum(spec.pooling_param, "pool")
        self.ceil = enum(spec.pooling_param, "round_mode") == "CEIL"
        if self.num_tops > 1 and self.method != "MAX":
            raise ConfigError(f"a second top holds the places of maxima; {self.method} pooling has none")

    def forward(self, x: Tensor) -> Any:
        if x.dim() != 4:
            raise ConfigError(f"its bottom has the shape {tuple(x.shape)}; it pools (N, C, H, W)")
        given = schema.message("PoolingParameter").FromString(self._given)
        windows = pooling_windows(given, (x.shape[2], x.shape[3]))
        tall, wide = pooled_sizes(x.shape[2:], windows, ceil=self.ceil)
        if self.method == "AVE":
            return average_pooled(x, windows, (tall, wide))
        if self.method == "STOCHASTIC":
            return self._stochastic(x, windows, (tall, wide))
        if self.num_tops == 1:
            return max_pooled(x, windows, (tall, wide))
        return self._with_places(x, windows, (tall, wide))

    def _with_places(self, x: Tensor, windows: Windows, counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Maxima, and where in their image each was found."""
        image = framed(x, windows, counts, torch.finfo(torch.float32).min)
        found, places = F.max_pool2d(image, windows.kernel, windows.stride, return_indices=True)
        rows = places // image.shape[3] - windows.pad[0]
        return found, (rows * x.shape[3] + places % image.shape[3] - windows.pad[1]).to(x.dtype)

    def _stochastic(self, x: Tensor, windows: Windows, counts: tuple[int, int]) -> Tensor:
        """Each window's value drawn in proportion to the values; their expectation when testing."""
        image = framed(x, windows, counts, 0.0)
        columns = F.unfold(image, windows.kernel, stride=windows.stride)
        columns = columns.view(x.shape[0], x.shape[1], -1, columns.shape[2])
        total = columns.sum(2)
        if self.training:
            sums = columns.cumsum(2)
            drawn = (sums < torch.rand_like(total)[:, :, None] * total[:, :, None]).sum(2, keepdim=True)
            found = columns.gather(2, drawn.clamp_max(columns.shape[2] - 1)).squeeze(2)
        else:
            found = columns.square().sum(2) / total.clamp_min(torch.finfo(x.dtype).tiny)
        return found.view(x.shape[0], x.shape[1], *counts)


@layer("LRN")
class LRN(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.lrn_param
        if given.local_size % 2 == 0 or given.local_size > 1 << 12:
            raise ConfigError(f"local_size = {given.local_size} is not possible; it is an odd number below 4096")
        self.size = int(given.local_size)
        self.alpha, self.beta, self.k = float(given.alpha), float(given.beta), float(given.k)
        self.within = enum(given, "norm_region") == "WITHIN_CHANNEL"

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ConfigError(f"its bottom has the shape {tuple(x.shape)}; it normalises (N, C, H, W)")
        half = self.size // 2
        squares = x.square()
        if self.within:  # Caffe leaves k out here
            windows = Windows((self.size, self.size), (1, 1), (half, half), (1, 1))
            return x * (1 + self.alpha * average_pooled(squares, windows, (x.shape[2], x.shape[3]))).pow(-self.beta)
        rows = F.pad(squares.flatten(2).unsqueeze(1), (0, 0, half, half))
        sums = F.avg_pool2d(rows, (self.size, 1), stride=1, divisor_override=1)
        return x * (self.k + self.alpha / self.size * sums.view_as(x)).pow(-self.beta)


@layer("SPP")
class SPP(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.spp_param
        self.height, self.method = given.pyramid_height, enum(given, "pool")
        if not 1 <= self.height <= 10 or self.method == "STOCHASTIC":
            raise ConfigError(
                f"pyramid_height = {self.height} with {self.method} is not supported; 1 to 10, MAX or AVE"
            )

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for level in range(self.height):
            bins = 1 << level
            kernel = tuple(-(-side // bins) for side in x.shape[2:])
            pad = tuple((k * bins - side + 1) // 2 for k, side in zip(kernel, x.shape[2:], strict=True))
            windows = Windows(kernel, kernel, pad, (1, 1))
            tall, wide = pooled_sizes(x.shape[2:], windows, ceil=True)
            pooled = max_pooled if self.method == "MAX" else average_pooled
            found.append(pooled(x, windows, (tall, wide)))
        return torch.cat([top.flatten(1) for top in found], 1) if self.height > 1 else found[0]


@layer("Crop")
class Crop(Layer):
    bottoms = (2, 2)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.axis, self.offsets = spec.crop_param.axis, tuple(spec.crop_param.offset)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        first = axis_of(self.axis, x.dim())
        if len(self.offsets) > 1 and len(self.offsets) != x.dim() - first:
            raise ConfigError(
                f"{len(self.offsets)} offsets are given for {x.dim() - first} axes; give one, or one each"
            )
        for number, axis in enumerate(range(first, x.dim())):
            offset = self.offsets[number if len(self.offsets) > 1 else 0] if self.offsets else 0
            if offset + like.shape[axis] > x.shape[axis]:
                raise ConfigError(f"axis {axis}: {like.shape[axis]} from {offset} on do not lie in {x.shape[axis]}")
            x = x.narrow(axis, offset, like.shape[axis])
        return x


@layer("Interp")
class Interp(Layer):
    """Bilinear resizing with aligned corners, of the DeepLab branch."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.interp_param
        self.size = (given.height, given.width)
        self.zoom, self.shrink = given.zoom_factor, given.shrink_factor
        self.pad = (given.pad_beg, given.pad_end)
        if self.zoom < 1 or self.shrink < 1 or any(p > 0 for p in self.pad):
            raise ConfigError("interp_param: zoom_factor and shrink_factor are at least 1, paddings at most 0")

    def forward(self, x: Tensor) -> Tensor:
        begin, end = self.pad
        x = x[:, :, -begin : x.shape[2] + end, -begin : x.shape[3] + end]
        size = self.size
        if not all(size):
            tall, wide = ((side - 1) // self.shrink + 1 for side in x.shape[2:])
            size = (tall + (tall - 1) * (self.zoom - 1), wide + (wide - 1) * (self.zoom - 1))
        return F.interpolate(x, size, mode="bilinear", align_corners=True)
