"""Layers in front of a network of images: they shift, mirror and crop at random while it trains, and centre the values.

In evaluation and prediction nothing is random: `Shift` and `Mirror` do nothing, and `Crop` takes the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor, nn

from thinwire.errors import ConfigError, DataError
from thinwire.values import whole


class Crop(nn.Module):
    """A window of each image: anywhere in it while training, each row's own, and in the middle otherwise.

    Args:
        size: height and width of the window, or both as one number.
    """

    as_one_layer: ClassVar[bool] = True

    def __init__(self, size: int | tuple[int, int]) -> None:
        super().__init__()
        high, wide = size if isinstance(size, tuple) else (size, size)
        self.size = int(whole(1)("Crop.size", high)), int(whole(1)("Crop.size", wide))

    def forward(self, x: Tensor) -> Tensor:
        (high, wide), (tall, broad) = x.shape[-2:], self.size
        if tall > high or broad > wide:
            raise DataError(f"Crop.size = {self.size} is larger than the images, {high} × {wide}; resize them first")
        if not self.training:
            top, left = (high - tall) // 2, (wide - broad) // 2
            return x[..., top : top + tall, left : left + broad]
        rows = len(x)
        tops = torch.randint(high - tall + 1, (rows,), device=x.device)
        lefts = torch.randint(wide - broad + 1, (rows,), device=x.device)
        down = tops[:, None] + torch.arange(tall, device=x.device)
        across = lefts[:, None] + torch.arange(broad, device=x.device)
        picked = torch.arange(rows, device=x.device)[:, None, None]
        return x.permute(0, 2, 3, 1)[picked, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.size[0]}, {self.size[1]}"


class Shift(nn.Module):
    """Moves each image by up to so many pixels in either direction while training; what comes in is `fill`.

    Args:
        pixels: at most, up or down and left or right.
        fill: the value at the borders.
    """

    as_one_layer: ClassVar[bool] = True

    def __init__(self, pixels: int, fill: float = 0.0) -> None:
        super().__init__()
        self.pixels, self.fill = int(whole(0)("Shift.pixels", pixels)), float(fill)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.pixels:
            return x
        window = Crop((int(x.shape[-2]), int(x.shape[-1])))
        moved: Tensor = window(F.pad(x, [self.pixels] * 4, value=self.fill))
        return moved

    def extra_repr(self) -> str:
        return f"{self.pixels}, fill={self.fill}"


class Mirror(nn.Module):
    """Turns each image left to right with a chance of one half while training."""

    as_one_layer: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        turned = torch.rand(len(x), device=x.device) < 0.5
        return torch.where(turned.view(-1, 1, 1, 1), x.flip(-1), x)


class ChannelMean(nn.Module):
    """Takes the mean of each channel away, and divides by a spread of each where that is given.

    Args:
        mean: of each channel, or a mean image of channels × height × width.
        spread: of each channel, such as the standard deviation.
    """

    as_one_layer: ClassVar[bool] = True
    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, spread: Sequence[float] | Tensor | None = None) -> None:
        super().__init__()
        held = torch.as_tensor(mean, dtype=torch.float32)
        by = torch.ones_like(held) if spread is None else torch.as_tensor(spread, dtype=torch.float32)
        if held.dim() not in (1, 3) or by.dim() not in (1, 3) or bool((by <= 0).any()):
            raise ConfigError(
                f"ChannelMean takes a number for each channel, or an image, and spreads above 0; mean has the shape "
                f"{tuple(held.shape)}, spread {tuple(by.shape)}"
            )
        self.register_buffer("mean", held if held.dim() == 3 else held.view(-1, 1, 1))
        self.register_buffer("spread", by if by.dim() == 3 else by.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.mean.shape[0] not in (1, x.shape[1]):
            raise DataError(f"ChannelMean has {self.mean.shape[0]} channels, the images have {x.shape[1]}")
        return (x.float() - self.mean) / self.spread
