"""Buffers that are used again: touching new memory costs more than copying into memory that is already there."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Flat float32 buffers of one thread; whoever gives one back must be its last user."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """A buffer with anything in it: a spare one that is large enough but not wasteful, or a new one."""
        for index, buffer in enumerate(self._free):
            if size <= buffer.numel() <= 2 * size:
                return self._free.pop(index)[:size]
        return torch.empty(size)

    def give(self, buffer: Tensor) -> None:
        """Keeps a buffer for the next one who asks; the oldest go when there are too many."""
        whole = buffer if buffer._base is None else buffer._base
        self._free = [*self._free, whole][-self._most :]
