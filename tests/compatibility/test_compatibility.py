"""Each cell of docs/reference/what-works-with-what.md is equal to plain torch or refused, as the page says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compatibility.cells import SECTIONS, Outcome
from tests.compatibility.page import PAGE, Key, general, keys, read, written

SOME = ("SGD, momentum", "SGD, a rate by group", "Adam", "LBFGS, strong Wolfe", "ConjugateGradient")
SOME_MORE = ("SGD, lr a tensor", "Adafactor", "StepLR", "SGD, momentum, OneCycleLR", "Caffe net, SGD, momentum")
FEW = {section.title: set(section.rows) & {*SOME, *SOME_MORE} or set(section.rows) for section in SECTIONS}
"""Rows that `make test` runs too: an optimizer of each kind."""


def _cell(key: Key) -> Any:
    title, row, _ = key
    return pytest.param(key, id=", ".join(key), marks=[] if row in FEW[title] else pytest.mark.long)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [_cell(key) for key in keys()])
def test_a_cell_is_equal_to_plain_torch_or_refused_as_the_page_says(key: Key) -> None:
    title, row, column = key
    found = next(section for section in SECTIONS if section.title == title).outcome(row, column)
    assert found.kind != "neither", found.reason
    assert Outcome(found.kind, general(found.reason)) == read()[key], "write the page anew: make compatibility"


def test_the_page_is_what_its_cells_make_it() -> None:
    said = read()
    assert list(said) == keys()
    assert written(said) == PAGE.read_text()


def test_a_page_with_a_cell_that_is_neither_is_not_written() -> None:
    said = read()
    key = next(iter(said))
    with pytest.raises(ValueError, match="neither equal nor refused"):
        written(said | {key: Outcome("neither", "0.3 from one worker")})
