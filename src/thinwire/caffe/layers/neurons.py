"""Layers that treat every number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, axis_of, layer
from thinwire.errors import ConfigError


@layer("ReLU")
class ReLU(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.negative_slope = spec.relu_param.negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope) if self.negative_slope else F.relu(x)


@layer("PReLU")
class PReLU(Layer):
    blobs = ("weight",)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.shared = spec.prelu_param.channel_shared
        self._filler = Filler.of(spec.prelu_param, "filler", Filler(value=0.25))

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        if len(bottoms[0]) < 2:
            raise ConfigError("its bottom needs a second axis, of channels")
        return [() if self.shared else (bottoms[0][1],)]

    def fillers(self) -> Sequence[Filler]:
        return [self._filler]

    def forward(self, x: Tensor) -> Tensor:
        slope = self.blob(0)
        if slope.dim():
            slope = slope.view(-1, *[1] * (x.dim() - 2))
        return torch.where(x > 0, x, slope * x)


@layer("ELU")
class ELU(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.alpha = spec.elu_param.alpha

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.alpha * torch.expm1(x.clamp_max(0)))


@layer("Sigmoid")
class Sigmoid(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


@layer("TanH")
class TanH(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@layer("AbsVal")
class AbsVal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


@layer("BNLL")
class BNLL(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, threshold=50)


@layer("Swish")
class Swish(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.beta = float(spec.swish_param.beta)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@layer("Clip")
class Clip(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.clip_param
        if not (given.HasField("min") and given.HasField("max")):
            raise ConfigError("clip_param needs min and max")
        self.low, self.high = given.min, given.max

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)


@layer("Threshold")
class Threshold(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.threshold = float(spec.threshold_param.threshold)

    def forward(self, x: Tensor) -> Tensor:
        return (x > self.threshold).to(x.dtype)


@layer("Power")
class Power(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.power_param
        self.power, self.scale, self.shift = float(given.power), float(given.scale), float(given.shift)

    def forward(self, x: Tensor) -> Tensor:
        if self.power * self.scale == 0:  # Caffe gives a constant without derivative
            return torch.full_like(x, self.shift).pow(self.power) + 0 * torch.nan_to_num(x)
        inner = x * self.scale + self.shift
        return inner if self.power == 1 else torch.pow(inner, self.power)


@layer("Exp")
class Exp(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.exp_param
        self.log_base = _log_base(given.base)
        self.scale, self.shift = float(given.scale), float(given.shift)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp((x * self.scale + self.shift) * self.log_base)


@layer("Log")
class Log(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.log_param
        self.log_base = _log_base(given.base)
        if self.log_base == 0:
            raise ConfigError("log_param.base = 1 has no logarithms")
        self.scale, self.shift = float(given.scale), float(given.shift)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * self.scale + self.shift) / self.log_base


def _log_base(base: float) -> float:
    if base == -1:
        return 1.0
    if base <= 0:
        raise ConfigError(f"base = {base} is not possible; give a positive one, or -1 for e")
    return math.log(base)


@layer("Dropout")
class Dropout(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.ratio = spec.dropout_param.dropout_ratio
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"dropout_ratio = {self.ratio} is not possible; it is at least 0 and below 1")

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.ratio, self.training)


@layer("Softmax")
class Softmax(Layer):
    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.axis = spec.softmax_param.axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, axis_of(self.axis, x.dim()))
