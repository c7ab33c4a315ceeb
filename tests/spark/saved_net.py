"""The network of the models in tests/golden/saved, which name it: neither may move."""

from __future__ import annotations

import torch
from torch import nn


class SavedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)
