"""The list of planted mistakes fits the source as it is; `python -m tests.mutations` plants them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutations.planted import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_planted(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert mutation.tests
    for test in mutation.tests:
        assert (ROOT / test.partition("::")[0]).exists()


def test_there_are_twenty_of_as_many_names() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
