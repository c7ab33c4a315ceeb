"""What a program of tensor operations may take: memory at one time, and elements that its operations visit.

A program is carried out on torch's meta device first, where tensors have shapes and no memory. A `Budget` watches that,
and stops it where the numbers of rows at hand would take more than is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

MOST_VALUE_BYTES = 1 << 30
"""Of what one operation gives for two rows; of one row is half as much."""
MOST_LIVE_BYTES = 4 << 30
"""Of all that operations have given and later ones still need, at any one time."""
MOST_COLUMNS_BYTES = 16 << 30
"""Of the patches that a convolution may write one beside the other before it multiplies them."""
MOST_VISITS_A_ROW = 1 << 44
"""Elements that are read or multiplied, by all operations together."""
MOST_TENSORS = 1 << 18
"""Made by all operations together: one may give thousands."""
MOST_DIMENSIONS = 64
MOST_RESIZED = 256
"""Operations that resize or sample pictures: torch takes up to 30 ms for the shape of each."""
_RESIZING = ("upsample_", "grid_sampler_")


class ExceededError(Exception):
    """What a program would take more of than is allowed."""


class Budget:
    """What one pass of a program for some rows has taken so far."""

    def __init__(self, rows: int, held: Iterator[Tensor]) -> None:
        """Begins a pass.

        Args:
            rows: how many the inputs have.
            held: tensors that are there anyway: parameters, constants and inputs.
        """
        self._rows = rows
        self._held = {_memory(each) for each in held}
        self._live: dict[int, int] = {}
        """How many values lie in the same memory."""
        self._live_bytes = self._visits = self._tensors = self._resized = 0

    def made(self, op: str, given: Mapping[str, Any], found: Any) -> None:
        """Takes what an operation has given into account.

        Raises:
            ExceededError: It is too much.
        """
        results = list(_tensors(found))
        self._tensors += len(results)
        self._resized += op.startswith(_RESIZING)
        self._visits += _visits(op, given, results)
        for each in results:
            self._keep(each)
        for what, value, most in (
            ("tensors", self._tensors, MOST_TENSORS),
            ("dimensions", max((each.dim() for each in results), default=0), MOST_DIMENSIONS),
            ("operations that resize pictures", self._resized, MOST_RESIZED),
            ("bytes in one value", max(map(_bytes, results), default=0), MOST_VALUE_BYTES * max(2, self._rows) // 2),
            ("bytes at one time", self._live_bytes, MOST_LIVE_BYTES),
            ("bytes of a convolution's patches", _columns_bytes(op, given, results), MOST_COLUMNS_BYTES),
            ("elements visited", self._visits, MOST_VISITS_A_ROW * self._rows),
        ):
            if value > most:
                raise ExceededError(f"{op} brings it to {value} {what} for {self._rows} rows; at most {most}")

    def freed(self, value: Any) -> None:
        """Nothing after this needs a value."""
        for each in _tensors(value):
            memory = _memory(each)
            if memory in self._live:
                self._live[memory] -= 1
                if not self._live[memory]:
                    del self._live[memory]
                    self._live_bytes -= each.untyped_storage().nbytes()

    def _keep(self, each: Tensor) -> None:
        memory = _memory(each)
        if memory in self._held:
            return
        if memory not in self._live:
            self._live_bytes += each.untyped_storage().nbytes()
        self._live[memory] = self._live.get(memory, 0) + 1


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that share memory, where that has no address too."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


_PRODUCTS = {
    "mm.default": "self",
    "bmm.default": "self",
    "addmm.default": "mat1",
    "baddbmm.default": "batch1",
    "linear.default": "input",
    "_cdist_forward.default": "x1",
}
"""Products of matrices, and the argument whose rows are summed over."""
_SEVERAL = {"sort.default": 64, "topk.default": 64, "upsample_": 64, "grid_sampler_": 64}
"""Visits for each element of others that are not one."""


def _visits(op: str, given: Mapping[str, Any], results: list[Tensor]) -> int:
    """How many elements an operation visits, within a small factor."""
    elements = [each.numel() for each in (*_tensors(list(given.values())), *results)]
    made = max((each.numel() for each in results), default=0)
    if op in _PRODUCTS and isinstance(factor := given[_PRODUCTS[op]], Tensor):
        return sum(elements) + made * int(factor.shape[-1] if factor.dim() else 1)
    if op == "convolution.default" and isinstance(weight := given["weight"], Tensor):
        of = given["input"].numel() if given["transposed"] else made
        return sum(elements) + of * (weight.numel() // max(1, weight.shape[0]))
    if "_avg_pool" in op or op.startswith(("avg_pool", "max_pool")):
        return sum(elements) + _visits_of_windows(op, given, made)
    factors = [times for start, times in _SEVERAL.items() if op.startswith(start)]
    return sum(elements) * max(factors, default=1)


def _visits_of_windows(op: str, given: Mapping[str, Any], made: int) -> int:
    dimensions = int(op[op.index("pool") + 4])
    if "kernel_size" in given:
        kernel = given["kernel_size"]
        sizes = kernel if isinstance(kernel, list) else [kernel]
        return int(made * math.prod(sizes) ** (dimensions if len(sizes) == 1 else 1))
    read, size = given["self"], given["output_size"]  # adaptive: each window has its share, and one more
    sizes = size if isinstance(size, list) else [size]
    areas = zip(read.shape[-dimensions:], sizes, strict=False)
    return int(math.prod(read.shape[:-dimensions]) * math.prod(before + 2 * after for before, after in areas))


def _columns_bytes(op: str, given: Mapping[str, Any], results: list[Tensor]) -> int:
    """What a convolution takes beside its result where torch has no kernel of its own for it."""
    if op != "convolution.default" or not results or not results[0].dim():
        return 0
    picture = given["input"] if given["transposed"] else results[0]
    weight, groups = given["weight"], given["groups"]
    places = picture.numel() // max(1, picture.shape[1] if picture.dim() > 1 else 1)
    return int(places * (weight.numel() // max(1, weight.shape[0])) * groups * weight.element_size())
