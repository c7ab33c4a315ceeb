from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def same() -> Callable[[object, object], bool]:
    """Whether two trees have the same types, keys in the same order, and values equal to the last bit."""
    return _same


def _same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
    if isinstance(left, (np.ndarray, np.generic)) and isinstance(right, (np.ndarray, np.generic)):
        same_type = left.dtype == right.dtype and left.shape == right.shape
        return same_type and left.tobytes() == right.tobytes()
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict) and isinstance(right, dict):
        return _same(list(left), list(right)) and _same(list(left.values()), list(right.values()))
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
