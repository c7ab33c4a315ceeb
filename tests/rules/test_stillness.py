"""What nobody has moved, against a plain look at every cell."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.rules.stillness import CELL, MOST, SHARE, common, still


@given(st.lists(st.booleans(), min_size=1, max_size=2 * MOST - 1), st.integers(0, CELL - 1))
def test_stretches_are_the_whole_cells_of_zeros(cells: list[bool], short: int) -> None:
    values = torch.cat([torch.full((CELL,), float(moved)) for moved in cells])
    values = values[: len(values) - short]
    covered = torch.zeros(len(values), dtype=torch.bool)
    for start, stop in still(values, 1000):
        assert start < stop
        covered[start - 1000 : stop - 1000] = True
    assert torch.equal(covered, values == 0)


def test_one_value_that_moved_is_enough_for_its_cell() -> None:
    values = torch.zeros(3 * CELL)
    values[CELL + 3] = 1e-30
    assert still(values) == [(0, CELL), (2 * CELL, 3 * CELL)]


def test_of_many_stretches_the_longest_are_told() -> None:
    cell = [torch.zeros(CELL), torch.ones(CELL)]
    values = torch.cat([torch.zeros(5 * CELL), torch.ones(CELL), *cell * (2 * MOST)])
    found = still(values)
    assert len(found) == MOST
    assert found[0] == (0, 5 * CELL)


def test_what_is_small_beside_the_whole_is_not_told() -> None:
    values = torch.ones(2 * SHARE * CELL)
    values[:CELL] = 0.0
    assert still(values) == []
    values[: 2 * CELL] = 0.0
    assert still(values) == [(0, 2 * CELL)]


def test_what_is_common_lies_in_everybodys() -> None:
    assert common([[(0, 64)], []]) == []
    assert common([[(0, 64), (80, 96)], [(32, 90)], [(48, 96)]]) == [(48, 64), (80, 90)]
