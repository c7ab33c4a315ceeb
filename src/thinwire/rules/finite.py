"""Whether numbers are finite, at the cost of one pass over values that lie in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum is not finite where one of its terms is not, and costs a thirtieth of looking at each. A sum of finite values
    may overflow, so only a sum that is not finite has each value looked at.

    >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    >>> is_finite(torch.tensor([3e38, 3e38]))
    True
    """
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no value of any of these tensors is NaN or infinite.

    >>> are_finite([torch.ones(2), torch.zeros(3)]), are_finite([torch.ones(2), torch.full((1,), float("inf"))])
    (True, False)
    >>> are_finite([])
    True
    """
    if not tensors:
        return True
    total = torch.stack([tensor.sum() for tensor in tensors]).sum()
    return math.isfinite(float(total)) or all(bool(tensor.isfinite().all()) for tensor in tensors)


def count_not_finite(values: Tensor) -> int:
    """How many values are NaN or infinite.

    >>> count_not_finite(torch.tensor([1.0, float("inf"), float("nan")]))
    2
    """
    return int(values.numel() - int(values.isfinite().sum()))
