"""Fits that run at the same time, as those of CrossValidator(parallelism=…), and the slots that they share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")

from thinwire.spark.turns import Turns, turns_of


class Fit:
    """A fit in a thread of its own, which ends when it is told to."""

    def __init__(self, turns: Turns, wanted: int | None, there: int) -> None:
        self.began, self.over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(turns, wanted, there), daemon=True)
        self._thread.start()

    def _run(self, turns: Turns, wanted: int | None, there: int) -> None:
        with turns.slots(wanted, there):
            self.began.set()
            self.over.wait()

    def end(self) -> None:
        self.over.set()
        self._thread.join()


def until_waiting(turns: Turns, count: int) -> None:
    while turns.waiting < count:
        threading.Event().wait(0.001)


def test_fits_run_together_as_far_as_their_slots_go_and_others_wait_in_turn() -> None:
    turns = Turns()
    first, second = Fit(turns, 2, 4), Fit(turns, 2, 4)
    assert first.began.wait(60)
    assert second.began.wait(60)
    large = Fit(turns, 3, 4)
    until_waiting(turns, 1)
    small = Fit(turns, 1, 4)
    until_waiting(turns, 2)
    first.end()
    assert not large.began.is_set()
    assert not small.began.is_set(), "the large one came first, and would starve"
    second.end()
    assert large.began.wait(60)
    assert small.began.wait(60)
    large.end()
    small.end()
    assert turns.waiting == 0


@pytest.mark.parametrize("wanted", [None, 4, 9])
def test_a_fit_that_takes_the_whole_cluster_has_it_alone(wanted: Any) -> None:
    turns = Turns()
    first = Fit(turns, wanted, 4)
    assert first.began.wait(60)
    second = Fit(turns, 1, 4)
    until_waiting(turns, 1)
    assert not second.began.is_set()
    first.end()
    assert second.began.wait(60)
    second.end()


def test_a_fit_that_fails_leaves_its_slots() -> None:
    turns = Turns()
    with pytest.raises(ArithmeticError), turns.slots(4, 4):
        raise ArithmeticError
    with turns.slots(4, 4):
        assert turns.waiting == 0


def test_each_application_has_slots_of_its_own() -> None:
    assert turns_of("a") is turns_of("a")
    assert turns_of("a") is not turns_of("b")
