"""The sizes of windows: kernels, strides and paddings as convolution and pooling write them, and Caffe's pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.errors import ConfigError

LOWEST = torch.finfo(torch.float32).min
MAX_SIDE = 1 << 16


class Windows(NamedTuple):
    """One number for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]


def convolution_windows(given: Any, axes: int) -> Windows:
    """A ConvolutionParameter's windows over so many spatial axes."""
    kernel = _repeated(given, "kernel_size", "kernel", axes, None)
    stride = _repeated(given, "stride", "stride", axes, 1)
    pad = _repeated(given, "pad", "pad", axes, 0)
    dilation = _repeated(given, "dilation", "", axes, 1)
    return checked(Windows(kernel, stride, pad, dilation))


def checked(windows: Windows) -> Windows:
    """The same windows; refuses those that cannot be."""
    for name in ("kernel", "stride", "dilation"):
        if any(not 1 <= size <= MAX_SIDE for size in getattr(windows, name)):
            raise ConfigError(f"{name} = {getattr(windows, name)} is not possible; sizes are from 1 to {MAX_SIDE}")
    if any(size > MAX_SIDE for size in windows.pad):
        raise ConfigError(f"pad = {windows.pad} is not possible; at most {MAX_SIDE}")
    return windows


def _repeated(given: Any, field: str, short: str, axes: int, default: int | None) -> tuple[int, ...]:
    """A size for each axis: from name_h and name_w, from one number for all, or from a number each."""
    if short and (given.HasField(f"{short}_h") or given.HasField(f"{short}_w")):
        if axes != 2 or len(getattr(given, field)):
            raise ConfigError(f"{short}_h and {short}_w are for two spatial axes, in place of {field}")
        return (getattr(given, f"{short}_h"), getattr(given, f"{short}_w"))
    values = tuple(getattr(given, field))
    if not values:
        if default is None and axes:
            raise ConfigError(f"{field} is missing")
        return (default or 0,) * axes
    if len(values) not in (1, axes):
        raise ConfigError(f"{field} is given {len(values)} times for {axes} spatial axes; give it once, or for each")
    return values * axes if len(values) == 1 else values


def pooling_windows(given: Any, size: tuple[int, int]) -> Windows:
    """A PoolingParameter's windows over an image of this size."""
    if given.global_pooling:
        if given.HasField("kernel_size") or given.HasField("kernel_h") or given.HasField("kernel_w"):
            raise ConfigError("with global_pooling the kernel is the whole image; leave its size out")
        kernel = size
    else:
        kernel = _single(given, "kernel", "kernel_size")
    stride, pad = _single(given, "stride", "stride"), _single(given, "pad", "pad")
    if given.global_pooling and (stride != (1, 1) or pad != (0, 0)):
        raise ConfigError("with global_pooling stride is 1 and pad is 0")
    if any(p >= k for p, k in zip(pad, kernel, strict=True)):
        raise ConfigError(f"pad {pad} must be smaller than the kernel {kernel}")
    return checked(Windows(kernel, stride, pad, (1, 1)))


def _single(given: Any, short: str, field: str) -> tuple[int, int]:
    tall, wide = f"{short}_h", f"{short}_w"
    if given.HasField(tall) or given.HasField(wide):
        if given.HasField(field) or not (given.HasField(tall) and given.HasField(wide)):
            raise ConfigError(f"give either {field}, or both {tall} and {wide}")
        return getattr(given, tall), getattr(given, wide)
    if short == "kernel" and not given.HasField(field):
        raise ConfigError(f"{field} is missing")
    return getattr(given, field), getattr(given, field)


def pooled_sizes(sides: Sequence[int], windows: Windows, *, ceil: bool) -> tuple[int, int]:
    """How many windows Caffe places on both axes; with padding on one, it looks at the ends of both."""
    clipped = any(windows.pad)
    tall, wide = (pooled_size(*side, ceil=ceil, clipped=clipped) for side in zip(sides, *windows[:3], strict=True))
    return tall, wide


def pooled_size(size: int, kernel: int, stride: int, pad: int, *, ceil: bool, clipped: bool | None = None) -> int:
    """How many windows Caffe places: rounded up, but none that begins beyond the image and its padding before it.

    >>> pooled_size(10, 2, 3, 1, ceil=True), pooled_size(32, 3, 2, 0, ceil=True)
    (4, 16)
    """
    steps = (size + 2 * pad - kernel) / stride
    count = int(math.ceil(steps) if ceil else math.floor(steps)) + 1
    if (pad if clipped is None else clipped) and (count - 1) * stride >= size + pad:
        count -= 1
    if count < 1:
        raise ConfigError(f"a kernel of {kernel} does not fit into {size} with pad {pad}")
    return count


def framed(x: Tensor, windows: Windows, counts: tuple[int, int], value: float) -> Tensor:
    """An image with just the frame that its windows reach into."""
    sides = []
    for size, kernel, stride, pad, count in zip(x.shape[2:], *windows[:3], counts, strict=True):
        sides.append((pad, (count - 1) * stride + kernel - size - pad))
    (top, bottom), (left, right) = sides
    return F.pad(x, (left, right, top, bottom), value=value)


def average_divisors(size: int, kernel: int, stride: int, pad: int, count: int) -> Tensor:
    """How many numbers each window counts: its padding too, but nothing beyond it."""
    starts = torch.arange(count) * stride - pad
    return (starts + kernel).clamp_max(size + pad) - starts


def max_pooled(x: Tensor, windows: Windows, counts: tuple[int, int]) -> Tensor:
    """The largest number in each window; padding never is."""
    return F.max_pool2d(framed(x, windows, counts, LOWEST), windows.kernel, windows.stride)


def average_pooled(x: Tensor, windows: Windows, counts: tuple[int, int]) -> Tensor:
    """The mean of each window, by Caffe's count of it."""
    summed = F.avg_pool2d(framed(x, windows, counts, 0.0), windows.kernel, windows.stride, divisor_override=1)
    if x.device.type == "meta":
        return summed
    tall, wide = (average_divisors(*side) for side in zip(x.shape[2:], *windows[:3], counts, strict=True))
    return summed / tall.to(x.device, x.dtype)[:, None] / wide.to(x.device, x.dtype)
