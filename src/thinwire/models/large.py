"""The networks of the papers, in plain PyTorch, for 1,000 classes of images of 3 × 224 × 224 unless said."""

from __future__ import annotations

from torch import Tensor, nn
from torch import cat as join

CLASSES = 1000


def alexnet() -> nn.Module:
    """Krizhevsky et al. 2012, as in Caffe: two groups in the second, fourth and fifth convolution; 3 × 227 × 227."""
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(), nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, CLASSES),
    )  # fmt: skip


def vgg_a() -> nn.Module:
    """Simonyan and Zisserman 2014, configuration A: eight convolutions and three fully connected layers."""
    layers: list[nn.Module] = []
    before = 3
    for width, count in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, CLASSES),
    )  # fmt: skip


class Inception(nn.Module):
    """Four branches side by side, joined by channel."""

    def __init__(self, before: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = _conv(before, one, 1)
        self.three = nn.Sequential(_conv(before, three[0], 1), _conv(three[0], three[1], 3))
        self.five = nn.Sequential(_conv(before, five[0], 1), _conv(five[0], five[1], 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(before, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return join([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, size, stride, padding=size // 2), nn.ReLU())


def googlenet() -> nn.Module:
    """Szegedy et al. 2014, without the two classifiers on the side."""
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), pool, nn.LocalResponseNorm(5),
        _conv(64, 64, 1), _conv(64, 192, 3), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(480, 192, (96, 208), (16, 48), 64), Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64), Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(832, 256, (160, 320), (32, 128), 128), Inception(832, 384, (192, 384), (48, 128), 128),
        nn.AvgPool2d(7), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """Convolutions with a way around them: two of 3 × 3, or with a bottleneck 1 × 1, 3 × 3, 1 × 1."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                *_normed(before, width, 1, 1), nn.ReLU(), *_normed(width, width, 3, stride), nn.ReLU(),
                *_normed(width, after, 1, 1),
            )  # fmt: skip
        else:
            self.body = nn.Sequential(*_normed(before, width, 3, stride), nn.ReLU(), *_normed(width, width, 3, 1))
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Sequential(*_normed(before, after, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.body(x) + self.around(x))
        return found


def _normed(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)]


def _resnet(blocks: tuple[int, ...], bottleneck: bool) -> nn.Module:
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for number in range(count):
            layers.append(Residual(before, width, 2 if stage and not number else 1, bottleneck))
            before = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def resnet34() -> nn.Module:
    """He et al. 2015."""
    return _resnet((3, 4, 6, 3), bottleneck=False)


def resnet152() -> nn.Module:
    """He et al. 2015."""
    return _resnet((3, 8, 36, 3), bottleneck=True)
