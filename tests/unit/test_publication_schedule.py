"""When the first worker evaluates, saves and stops, and what it announces again."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.worker.announcements import Announcements
from thinwire.worker.generation import Generation
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.publication_schedule import Decision, PublicationSchedule
from thinwire.worker.step_statistics import StepStatistics


class Writer:
    """A writer whose store may be slow."""

    def __init__(self) -> None:
        self.busy = False
        self.skipped: list[str] = []

    def skip(self, name: str) -> None:
        self.skipped.append(name)


class Bench:
    """A schedule with all that it looks at."""

    def __init__(self, **wanted: Any) -> None:
        plan = WorkerPlan(worker=0, attempt=0, **{"epochs": 3, "steps": None, "evaluates": True, **wanted})
        self.meter, self.generation, self.writer = StepStatistics(lambda: 0.0), Generation(), Writer()
        self.generation.total_rows = 20
        writer: Any = self.writer
        self.schedule = PublicationSchedule(plan, self.meter, self.generation, writer)

    def at(self, steps: int, *, rows: int = 0, others: int = 0) -> Decision:
        self.meter.steps, self.meter.rows = steps, rows
        self.generation.hear(1, others)
        return self.schedule.decide(number=7)


def test_an_epoch_is_over_when_the_rows_of_all_workers_make_one_and_the_last_is_left_to_the_end() -> None:
    bench = Bench()
    due = [bench.at(step, rows=10 * step, others=10 * step).evaluate for step in range(1, 4)]
    assert due == [True, True, False]


def test_steps_between_evaluations_are_counted_from_the_last_one() -> None:
    bench = Bench(evaluate_every=3)
    assert [step for step in range(1, 10) if bench.at(step).evaluate] == [3, 6, 9]


@pytest.mark.parametrize("every", [None, 5])
def test_the_end_of_the_run_is_announced_once_with_a_checkpoint_where_the_run_writes_any(every: int | None) -> None:
    bench = Bench(checkpoint_every=every)
    bench.schedule.stop_reason = "asked to"
    assert [bench.at(1), bench.at(2)] == [Decision(save=every is not None, stop=True), Decision()]


def test_a_checkpoint_that_a_slow_store_has_no_room_for_is_left_out_and_the_next_one_is_due_as_late_as_ever() -> None:
    bench = Bench(checkpoint_every=4)
    bench.writer.busy = True
    assert not bench.at(4).save
    assert bench.writer.skipped == ["000007-step-4"]
    bench.writer.busy = False
    assert [step for step in range(5, 10) if bench.at(step).save] == [8]


def test_a_note_of_a_round_that_a_quorum_completed_without_this_worker_is_announced_once_more() -> None:
    mine = Announcements("0.0")
    mine.say(3, {"publish": 1})
    mine.say(4, {"publish": 2})
    mine.landed(3, heard=True)
    assert (mine.take_lost(), mine.newest) == ({}, 2)
    mine.landed(4, heard=False)
    assert mine.newest == 2
    assert mine.take_lost()["publish"] == 2
    assert (mine.take_lost(), mine.newest) == ({}, 0)
