"""Fits that run at the same time, as those of CrossValidator(parallelism=…), and the slots that they share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")

from thinwire.spark.slot_queue import SlotQueue, queue_of


class Fit:
    """A fit in a thread of its own, which ends when it is told to."""

    def __init__(self, queue: SlotQueue, wanted: int | None, there: int) -> None:
        self.began, self.over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(queue, wanted, there), daemon=True)
        self._thread.start()

    def _run(self, queue: SlotQueue, wanted: int | None, there: int) -> None:
        with queue.slots(wanted, there):
            self.began.set()
            self.over.wait()

    def end(self) -> None:
        self.over.set()
        self._thread.join()


def until_waiting(queue: SlotQueue, count: int) -> None:
    while queue.waiting < count:
        threading.Event().wait(0.001)


def test_fits_run_together_as_far_as_their_slots_go_and_others_wait_in_turn() -> None:
    queue = SlotQueue()
    first, second = Fit(queue, 2, 4), Fit(queue, 2, 4)
    assert first.began.wait(60)
    assert second.began.wait(60)
    large = Fit(queue, 3, 4)
    until_waiting(queue, 1)
    small = Fit(queue, 1, 4)
    until_waiting(queue, 2)
    first.end()
    assert not large.began.is_set()
    assert not small.began.is_set(), "the large one came first, and would starve"
    second.end()
    assert large.began.wait(60)
    assert small.began.wait(60)
    large.end()
    small.end()
    assert queue.waiting == 0


@pytest.mark.parametrize("wanted", [None, 4, 9])
def test_a_fit_that_takes_the_whole_cluster_has_it_alone(wanted: Any) -> None:
    queue = SlotQueue()
    first = Fit(queue, wanted, 4)
    assert first.began.wait(60)
    second = Fit(queue, 1, 4)
    until_waiting(queue, 1)
    assert not second.began.is_set()
    first.end()
    assert second.began.wait(60)
    second.end()


def test_a_fit_that_fails_leaves_its_slots() -> None:
    queue = SlotQueue()
    with pytest.raises(ArithmeticError), queue.slots(4, 4):
        raise ArithmeticError
    with queue.slots(4, 4):
        assert queue.waiting == 0


def test_each_application_has_slots_of_its_own() -> None:
    assert queue_of("a") is queue_of("a")
    assert queue_of("a") is not queue_of("b")
