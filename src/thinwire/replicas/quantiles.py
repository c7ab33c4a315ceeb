"""The quantile loss: what is smallest where outputs are quantiles of the label."""

from __future__ import annotations

import math
from typing import final

from torch import Tensor

from thinwire.errors import ConfigError


@final
class QuantileLoss:
    """Mean over quantiles of max(q·(y − f), (q − 1)·(y − f)), one number a row (Koenker and Bassett 1978).

    Args:
        quantiles: each between 0 and 1; the model has an output for each, in this order.
    """

    def __init__(self, *quantiles: float) -> None:
        for q in quantiles:
            if isinstance(q, bool) or not isinstance(q, int | float) or not (math.isfinite(q) and 0 < q < 1):
                raise ConfigError(f"QuantileLoss({q!r}) is not possible; a quantile is between 0 and 1, such as 0.9")
        if not quantiles:
            raise ConfigError("QuantileLoss() has no quantile; name some: tw.QuantileLoss(0.1, 0.5, 0.9)")
        self.quantiles = tuple(float(q) for q in quantiles)

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        """One loss a row.

        >>> import torch
        >>> QuantileLoss(0.9)(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])).tolist()
        [0.8999999761581421, 0.10000002384185791]
        """
        rows, count = len(label), len(self.quantiles)
        if output.numel() != rows * count or label.numel() != rows:
            raise ConfigError(
                f"QuantileLoss of {count} quantile{'s' if count > 1 else ''} is given outputs in the shape "
                f"{tuple(output.shape[1:])} a row and labels in {tuple(label.shape[1:])}; give the model an output for "
                "each quantile, and one number as label"
            )
        over = label.to(output.dtype).reshape(rows, 1) - output.reshape(rows, count)
        q = output.new_tensor(self.quantiles)
        found: Tensor = (over * (q - (over < 0).to(q.dtype))).mean(1)
        return found

    def __repr__(self) -> str:
        return f"QuantileLoss({', '.join(map(str, self.quantiles))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantileLoss) and other.quantiles == self.quantiles

    def __hash__(self) -> int:
        return hash(self.quantiles)


QUANTILES = {f"quantile_{percent}": QuantileLoss(percent / 100) for percent in (5, 10, 25, 50, 75, 90, 95)}
"""By name, as a loss and as a metric."""
