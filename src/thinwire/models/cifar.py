"""Networks for images of 3 × 32 × 32, and those of the data- and model-parallel framework's paper."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Shortened(nn.Module):
    """Two 3 × 3 convolutions with a way around them that has no parameters: strided, with channels of zeros added."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.stride, self.missing = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.first_norm(self.first(x)))
        found = self.second_norm(self.second(found))
        around = x[:, :, :: self.stride, :: self.stride]
        return F.relu(found + F.pad(around, (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2)))


def resnet_cifar(blocks: int) -> nn.Module:
    """He et al. 2015, section 4.2: three stages of so many blocks each, 6 · blocks + 2 layers in all."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for stage, width in enumerate((16, 32, 64)):
        for number in range(blocks):
            layers.append(Shortened(before, width, 2 if stage and not number else 1))
            before = width
    made = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return made


def resnet20() -> nn.Module:
    """0.27 million parameters."""
    return resnet_cifar(3)


def resnet110() -> nn.Module:
    """The network of MPCA's experiments: 1.7 million parameters."""
    return resnet_cifar(18)


def fully_connected() -> nn.Module:
    """Two hidden layers for 28 × 28 digits, Shrivastava et al.'s first kind of network; sizes are ours."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.Sigmoid(), nn.Linear(1024, 1024), nn.Sigmoid(), nn.Linear(1024, 10)
    )


def three_convolutions() -> nn.Module:
    """Three convolutions, a mean pool after the first two, for 3 × 32 × 32: Shrivastava et al.'s second kind."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
    )  # fmt: skip
