"""Auto-encoders: sparse and denoising. Called as modules they give a `Coded`, which their loss takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Coded(NamedTuple):
    """Rows, flat; the same rows as decoded from their codes; the codes; and what each row pays for using many units."""

    rows: Tensor
    again: Tensor
    code: Tensor
    penalty: Tensor


class AutoEncoder(nn.Module):
    """One hidden layer that a row has to pass through, with the same weights both ways unless said.

    Args:
        visible: numbers of a row, from 0 to 1.
        hidden: units of the code.
        noise: share of a row's numbers that are put to 0 before it is coded, in training (Vincent et al. 2008).
        sparsity: how often a unit is to be on, over a batch; None does not ask (Ng 2011).
        sparsity_weight: what a departure from it costs, as relative entropy.
        tied: whether decoding uses the transposed weights of coding.
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        *,
        noise: float = 0.0,
        sparsity: float | None = None,
        sparsity_weight: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.noise, self.sparsity, self.sparsity_weight = noise, sparsity, sparsity_weight
        self.encode = nn.Linear(visible, hidden)
        self.decode = None if tied else nn.Linear(hidden, visible)
        self.visible_bias = nn.Parameter(torch.zeros(visible)) if tied else None

    def forward(self, rows: Tensor) -> Coded:
        rows = rows.flatten(1).float()
        shown = rows
        if self.training and self.noise:
            shown = rows * torch.bernoulli(torch.full_like(rows, 1 - self.noise))
        code = torch.sigmoid(self.encode(shown))
        if self.decode is not None:
            again = torch.sigmoid(self.decode(code))
        else:
            assert self.visible_bias is not None
            again = torch.sigmoid(nn.functional.linear(code, self.encode.weight.t(), self.visible_bias))
        return Coded(rows, again, code, self._penalty(code))

    def _penalty(self, code: Tensor) -> Tensor:
        if self.sparsity is None:
            return code.new_zeros(code.shape[0])
        wanted, used = self.sparsity, code.mean(0).clamp(1e-6, 1 - 1e-6)
        apart = wanted * (wanted / used).log() + (1 - wanted) * ((1 - wanted) / (1 - used)).log()
        return (self.sparsity_weight * apart.sum()).expand(code.shape[0])


def coding_error(coded: Coded, label: Any = None) -> Tensor:
    """The squared error of each row as decoded, and its penalty; as `loss=` of `fit`."""
    return (coded.rows - coded.again).square().mean(1) + coded.penalty


def sparse_autoencoder() -> nn.Module:
    """128 units of which each is to be on for every twentieth row, for digits of 8 × 8."""
    return AutoEncoder(64, 128, sparsity=0.05, sparsity_weight=1e-3)


def denoising_autoencoder() -> nn.Module:
    """64 units, a fifth of each row's numbers left out, for digits of 8 × 8."""
    return AutoEncoder(64, 64, noise=0.2)
