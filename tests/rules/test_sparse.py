"""Touched rows of a table: exchanging them is exchanging the table, and what packing loses comes later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.rules.sparse import Rows, feed_back, owned, size_bytes, touched, weighted_mean

TABLE, WIDTH = 12, 3


def dense(rows: Rows) -> torch.Tensor:
    return torch.zeros(TABLE, WIDTH, dtype=torch.float64).index_add_(0, rows.numbers, rows.values)


def some(seed: int, count: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, TABLE, (count,), generator=draw)
    return touched(numbers, torch.randn(count, WIDTH, generator=draw, dtype=torch.float64))


NONE = Rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH, dtype=torch.float64))


def test_rows_of_a_sparse_gradient_add_up_as_torch_adds_them() -> None:
    gradient = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.eye(3), (5, 3), check_invariants=True)
    rows = touched(gradient._indices()[0], gradient._values())
    found = gradient.coalesce()
    assert torch.equal(rows.numbers, found.indices()[0])
    assert torch.equal(rows.values, found.values())


@settings(deadline=None, max_examples=40)
@given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=12), counts=st.integers(0, 9))
def test_what_was_sent_and_what_is_left_are_all_that_was_given(seeds: list[int], counts: int) -> None:
    """Over any number of exchanges, whichever rows each touches."""
    residual, given_, sent_ = NONE, torch.zeros(TABLE, WIDTH, dtype=torch.float64), torch.zeros(TABLE, WIDTH).double()
    for seed in seeds:
        rows = some(seed, counts)
        sent, residual = feed_back(rows, residual, lambda values: values.mul(4).round().div(4))
        assert torch.equal(sent.numbers, rows.numbers), "only touched rows are sent"
        assert residual.numbers.tolist() == sorted(set(residual.numbers.tolist()))
        given_, sent_ = given_ + dense(rows), sent_ + dense(sent)
    torch.testing.assert_close(sent_ + dense(residual), given_)
    assert not len(residual.values) or residual.values.abs().max() <= 0.125 + 1e-12, "a row's residual does not grow"


def test_a_row_that_is_not_touched_keeps_its_residual() -> None:
    _, left = feed_back(some(1, 4), NONE, torch.floor)
    _, after = feed_back(NONE, left, torch.floor)
    assert all(map(torch.equal, after, left))


def test_what_is_not_packed_leaves_nothing() -> None:
    rows = some(2, 5)
    sent, left = feed_back(rows, NONE, torch.clone)
    assert all(map(torch.equal, sent, rows))
    assert not len(left.numbers)


def test_the_mean_of_rows_is_the_mean_of_tables() -> None:
    parts, weights = [some(seed, 6) for seed in range(3)], [1.0, 2.0, 5.0]
    expected = sum(w * dense(part) for part, w in zip(parts, weights, strict=True)) / 8
    torch.testing.assert_close(dense(weighted_mean(parts, weights)), expected)


@pytest.mark.parametrize("owners", [1, 3, 20])
def test_each_row_has_one_owner(owners: int) -> None:
    rows = some(3, 9)
    parts = owned(rows, owners)
    assert len(parts) == owners
    torch.testing.assert_close(sum(dense(part) for part in parts), dense(rows))
    assert sum(len(part.numbers) for part in parts) == len(rows.numbers)


def test_bytes_go_with_the_rows_that_were_touched() -> None:
    assert size_bytes(100, 16, 4) == 100 * (4 + 8)
    assert size_bytes(100, 3, 4) == 100 * (4 + 2)
