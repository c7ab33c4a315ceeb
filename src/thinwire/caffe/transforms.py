"""What a data layer does to raw images: mean, crop, mirror, scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.caffe.blobs import found_file, read_mean
from thinwire.errors import ConfigError, DataError


class Transformer(nn.Module):
    """A TransformationParameter as a module: crops at random while training, in the middle otherwise.

    Args:
        given: the TransformationParameter.
        folder: where a relative mean_file is looked for when it is not found from here.
    """

    mean: Tensor | None

    def __init__(self, given: Any, folder: str = ".") -> None:
        super().__init__()
        if given.HasField("mean_file") and given.mean_value:
            raise ConfigError("transform_param has mean_file and mean_value; give one of them")
        mean: Tensor | None = None
        if given.HasField("mean_file"):
            mean = read_mean(found_file(given.mean_file, folder))
            mean = mean.view(mean.shape[-3:])
        elif given.mean_value:
            mean = torch.tensor(list(given.mean_value)).view(-1, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.scale, self.crop, self.mirror = given.scale, int(given.crop_size), given.mirror

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.mean is not None:
            if self.mean.dim() == 3 and self.mean.shape[0] not in (1, x.shape[1]):
                raise DataError(f"the mean has {self.mean.shape[0]} channels, the images {x.shape[1]}")
            x = x - self.mean
        if self.crop or self.mirror:
            x = self._cropped(x)
        return x * self.scale if self.scale != 1 else x

    def _cropped(self, x: Tensor) -> Tensor:
        rows, _, high, wide = x.shape
        tall, broad = self.crop or high, self.crop or wide
        if tall > high or broad > wide:
            raise DataError(f"crop_size {self.crop} is larger than the images, {high} × {wide}")
        if self.training and self.crop:
            top = torch.randint(high - tall + 1, (rows,), device=x.device)
            left = torch.randint(wide - broad + 1, (rows,), device=x.device)
        else:
            top = torch.full((rows,), (high - tall) // 2, device=x.device)
            left = torch.full((rows,), (wide - broad) // 2, device=x.device)
        down = top[:, None] + torch.arange(tall, device=x.device)
        across = left[:, None] + torch.arange(broad, device=x.device)
        if self.mirror:
            turned = torch.rand(rows, device=x.device) < 0.5
            across = torch.where(turned[:, None], across.flip(1), across)
        picked = torch.arange(rows, device=x.device)[:, None, None]
        return x.permute(0, 2, 3, 1)[picked, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
