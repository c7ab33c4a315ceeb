"""Exchanging a large table by the rows that were touched, with error feedback row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Some rows of a table: their numbers, ascending and each once, and a value for each."""

    numbers: Tensor
    values: Tensor


def touched(numbers: Tensor, values: Tensor) -> Rows:
    """Rows of a sparse gradient or displacement, each once, with the sum of its values.

    >>> rows = touched(torch.tensor([3, 1, 3]), torch.tensor([[1.0], [2.0], [4.0]]))
    >>> rows.numbers.tolist(), rows.values.tolist()
    ([1, 3], [[2.0], [5.0]])
    """
    found, places = torch.unique(numbers, return_inverse=True)
    return Rows(found, values.new_zeros(len(found), *values.shape[1:]).index_add_(0, places, values))


def feed_back(rows: Rows, residual: Rows, pack: Callable[[Tensor], Tensor]) -> tuple[Rows, Rows]:
    """What is sent of rows d with residual e, and what is left: q = C(d + e) and e' = d + e − q, on touched rows.

    The residual of a row that was not touched stays and is not sent, so that bytes go with the rows of a batch, not
    with those of the table (Seide et al. 2014, row by row; with C the identity nothing stays).

    Args:
        rows: the contribution.
        residual: what packing has lost so far, of the rows that lost something.
        pack: what a receiver unpacks, C.

    >>> sent, left = feed_back(
    ...     Rows(torch.tensor([1, 4]), torch.tensor([[0.75], [2.0]])),
    ...     Rows(torch.tensor([0, 1]), torch.tensor([[0.25], [0.5]])),
    ...     torch.floor,
    ... )
    >>> sent.numbers.tolist(), sent.values.tolist()
    ([1, 4], [[1.0], [2.0]])
    >>> left.numbers.tolist(), left.values.tolist()
    ([0, 1], [[0.25], [0.25]])
    """
    kept = ~torch.isin(residual.numbers, rows.numbers)
    due = Rows(residual.numbers[~kept], residual.values[~kept])
    values = rows.values.index_add(0, torch.searchsorted(rows.numbers, due.numbers), due.values)
    packed = pack(values)
    lost = values - packed
    wrong = lost.flatten(1).any(1)
    numbers = torch.cat([residual.numbers[kept], rows.numbers[wrong]])
    left = torch.cat([residual.values[kept], lost[wrong]])
    order = numbers.argsort()
    return Rows(rows.numbers, packed), Rows(numbers[order], left[order])


def weighted_mean(parts: Sequence[Rows], weights: Sequence[float]) -> Rows:
    """Σ w·d / Σ w over workers, of all rows that any of them touched; one that did not touch a row counts as 0 there.

    >>> one, other = Rows(torch.tensor([1]), torch.tensor([[4.0]])), Rows(torch.tensor([2]), torch.tensor([[8.0]]))
    >>> mean = weighted_mean([one, other], [3.0, 1.0])
    >>> mean.numbers.tolist(), mean.values.tolist()
    ([1, 2], [[3.0], [2.0]])
    """
    total = sum(weights)
    scaled = [part.values * (weight / total) for part, weight in zip(parts, weights, strict=True)]
    return touched(torch.cat([part.numbers for part in parts]), torch.cat(scaled))


def owned(rows: Rows, owners: int) -> list[Rows]:
    """The rows of each owner: row r belongs to owner r mod owners, so that frequent rows of low numbers are spread.

    >>> [part.numbers.tolist() for part in owned(Rows(torch.tensor([0, 1, 5]), torch.zeros(3, 1)), 2)]
    [[0], [1, 5]]
    """
    return [Rows(rows.numbers[mine], rows.values[mine]) for k in range(owners) for mine in [rows.numbers % owners == k]]


def size_bytes(rows: int, width: int, bits: int) -> int:
    """Bytes of some rows on the wire: a number of four bytes and `width` values of `bits` for each.

    >>> size_bytes(512, 16, 32), size_bytes(10_000_000, 16, 32)
    (34816, 680000000)
    """
    return rows * (4 + -(-width * bits // 8))
