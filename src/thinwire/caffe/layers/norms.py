"""Layers that scale, shift and normalise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, axis_of, layer
from thinwire.errors import ConfigError


@layer("BatchNorm")
class BatchNorm(Layer):
    """Normalises by the batch in training, by the running sums otherwise. Its third blob counts what they hold."""

    blobs = ("mean", "variance", "count")
    statistics = True

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.batch_norm_param
        self.global_stats = given.use_global_stats if given.HasField("use_global_stats") else None
        self.fraction, self.eps = float(given.moving_average_fraction), float(given.eps)

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        channels = bottoms[0][1] if len(bottoms[0]) > 1 else 1
        return [(channels,), (channels,), (1,)]

    def forward(self, x: Tensor) -> Tensor:
        channels = [1, -1, *[1] * (x.dim() - 2)] if x.dim() > 1 else [-1]
        if self.global_stats if self.global_stats is not None else not self.training:
            count = self.blob(2)
            scale = torch.where(count == 0, torch.zeros_like(count), 1 / count)
            mean, variance = (self.blob(0) * scale).view(channels), (self.blob(1) * scale).view(channels)
        else:
            axes = [axis for axis in range(x.dim()) if axis != 1]
            mean = x.mean(axes, keepdim=True)
            variance = (x - mean).square().mean(axes, keepdim=True)
            self._remember(mean, variance, x.numel() // mean.numel())
        return (x - mean) / (variance + self.eps).sqrt()

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, number: int) -> None:
        unbiased = number / (number - 1) if number > 1 else 1.0
        self.blob(2).mul_(self.fraction).add_(1)
        self.blob(0).mul_(self.fraction).add_(mean.flatten())
        self.blob(1).mul_(self.fraction).add_(variance.flatten(), alpha=unbiased)


@layer("MVN")
class MVN(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.mvn_param
        self.variance, self.across = bool(given.normalize_variance), bool(given.across_channels)
        self.eps = float(given.eps)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 4:
            raise ConfigError(f"its bottom has the shape {tuple(x.shape)}; it takes four axes at most")
        x = x.view(*x.shape, *[1] * (4 - x.dim()))
        axes = [1, 2, 3] if self.across else [2, 3]
        found: Tensor
        if self.variance:
            found = _Standardised.apply(x, axes, self.eps)  # type: ignore[no-untyped-call]
        else:
            found = x - x.mean(axes, keepdim=True)
        return found


class _Standardised(torch.autograd.Function):
    """Zero mean and unit deviation, with Caffe's way back: it takes the result's own mean square to be 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[int], eps: float) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        deviation = centred.square().mean(axes, keepdim=True).sqrt() + eps
        found = centred / deviation
        ctx.save_for_backward(found, deviation)
        ctx.axes = axes
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        found, deviation = ctx.saved_tensors
        inner = found * (found * gradient).mean(ctx.axes, keepdim=True) + gradient.mean(ctx.axes, keepdim=True)
        return (gradient - inner) / deviation, None, None


class _Broadcast(Layer):
    """What Scale and Bias have in common: a blob, or a second bottom, over some axes of the first."""

    bottoms = (1, 2)
    first: str

    def __init__(self, spec: Any, given: Any) -> None:
        super().__init__(spec)
        self.own = len(spec.bottom) == 1
        self.axis, self.num_axes = given.axis, given.num_axes

    def _own_shape(self, shape: Shape) -> Shape:
        first = axis_of(self.axis, len(shape))
        last = len(shape) if self.num_axes == -1 else first + self.num_axes
        if last > len(shape):
            raise ConfigError(f"axes {first} to {last} are not among the {len(shape)} of its bottom")
        return shape[first:last]

    def _over(self, x: Tensor, blob: Tensor) -> Tensor:
        first = axis_of(self.axis, x.dim()) if blob.dim() else 0
        return blob.view(*blob.shape, *[1] * (x.dim() - first - blob.dim()))


@layer("Scale")
class Scale(_Broadcast):
    blobs = ("weight", "bias")

    def __init__(self, spec: Any) -> None:
        given = spec.scale_param
        super().__init__(spec, given)
        self.kept = (("weight",) if self.own else ()) + (("bias",) if given.bias_term else ())
        self._fillers = {
            "weight": Filler.of(given, "filler", Filler(value=1.0)),
            "bias": Filler.of(given, "bias_filler"),
        }

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        shape = self._own_shape(bottoms[0]) if self.own else bottoms[1]
        return [shape for _ in self.kept]

    def fillers(self) -> Sequence[Filler]:
        return [self._fillers[name] for name in self.kept]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found = x * self._over(x, self.held("weight") if scale is None else scale)
        return found + self._over(x, self.held("bias")) if "bias" in self.kept else found


@layer("Bias")
class Bias(_Broadcast):
    blobs = ("bias",)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, spec.bias_param)
        self.kept = ("bias",) if self.own else ()
        self._filler = Filler.of(spec.bias_param, "filler")

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        return [self._own_shape(bottoms[0])] if self.own else []

    def fillers(self) -> Sequence[Filler]:
        return [self._filler] * len(self.kept)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + self._over(x, self.held("bias") if bias is None else bias)


@layer("Normalize")
class Normalize(Layer):
    """Unit length over channels (or all of a row) times a learnt scale, of the SSD branch."""

    blobs = ("weight",)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.norm_param
        self.across, self.shared = bool(given.across_spatial), bool(given.channel_shared)
        self.eps = float(given.eps)
        self._filler = Filler.of(given, "scale_filler", Filler(value=1.0))

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        return [() if self.shared else (bottoms[0][1],)]

    def fillers(self) -> Sequence[Filler]:
        return [self._filler]

    def forward(self, x: Tensor) -> Tensor:
        axes = list(range(1, x.dim())) if self.across else [1]
        scale = self.blob(0)
        if scale.dim():
            scale = scale.view(-1, *[1] * (x.dim() - 2))
        return x / (x.square().sum(axes, keepdim=True) + self.eps).sqrt() * scale
