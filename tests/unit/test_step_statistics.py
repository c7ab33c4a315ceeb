from __future__ import annotations

from collections.abc import Callable

import pytest

from thinwire.worker.step_statistics import StepStatistics

At = Callable[[float], None]


class Clock:
    """Shows what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def at(clock: Clock) -> Callable[[float], None]:
    """Sets the odometer's clock."""

    def move(seconds: float) -> None:
        clock.now = seconds

    return move


def test_steps_rows_and_positions_are_counted(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    for number in range(3):
        at(float(number))
        meter.end_step(meter.begin_step(), 16, 2.0, (0, number + 1))
    assert (meter.steps, meter.rows, meter.position) == (3, 48, (0, 3))


def test_the_share_of_time_spent_stepping_leaves_waits_and_pauses_out(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    at(0.0)
    begun = meter.begin_step()
    at(2.0)
    meter.waited(1.0)
    meter.end_step(begun, 1, 0.0, (0, 1))
    at(3.0)
    begun = meter.begin_step()
    at(4.0)
    meter.end_step(begun, 1, 0.0, (0, 2))
    report = meter.report()
    assert report["busy"] == pytest.approx(2.0 / 4.0)
    assert report["gap_s"] == pytest.approx(1.0)


def test_a_wait_is_taken_out_of_its_own_step_only(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    begun = meter.begin_step()
    meter.waited(0.5)
    at(1.0)
    meter.end_step(begun, 1, 0.0, (0, 1))
    assert meter.step_s == pytest.approx(0.5)
    begun = meter.begin_step()
    at(1.5)
    meter.end_step(begun, 1, 0.0, (0, 2))
    assert meter.step_s == pytest.approx(0.5)


def test_the_duration_of_a_step_is_smoothed(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    begun = meter.begin_step()
    at(1.0)
    meter.end_step(begun, 1, 0.0, (0, 1))
    begun = meter.begin_step()
    at(3.0)
    meter.end_step(begun, 1, 0.0, (0, 2))
    assert meter.step_s == pytest.approx(0.9 * 1.0 + 0.1 * 2.0)


def test_an_epoch_s_loss_is_weighted_by_rows_and_begins_anew() -> None:
    meter = StepStatistics()
    meter.end_step(meter.begin_step(), 30, 1.0, (0, 1))
    meter.end_step(meter.begin_step(), 10, 5.0, (1, 0))
    assert meter.end_epoch() == (40, pytest.approx(2.0))
    assert meter.end_epoch() == (0, None)


def test_a_report_has_the_losses_and_the_longest_pause_since_the_last_one(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    assert meter.report()["loss"] is None
    for moment, loss in ((0.0, 1.0), (5.0, 3.0), (6.0, 2.0)):
        at(moment)
        meter.end_step(meter.begin_step(), 1, loss, (0, 1))
    first = meter.report()
    assert (first["loss"], first["gap_s"]) == (2.0, 5.0)
    second = meter.report()
    assert (second["loss"], second["gap_s"]) == (None, 0.0)
    assert second["steps"] == 3


def test_what_a_checkpoint_needs_goes_there_and_back() -> None:
    meter = StepStatistics()
    meter.end_step(meter.begin_step(), 30, 1.5, (2, 7))
    again = StepStatistics()
    again.load(meter.tree())
    assert again.tree() == meter.tree()
    assert again.end_epoch() == meter.end_epoch()


def test_an_evaluation_counts_with_the_step_after_it(clock: Clock, at: At) -> None:
    meter = StepStatistics(clock)
    meter.evaluated(9.0)  # before the first step
    meter.end_step(meter.begin_step(), 16, 2.0, (0, 1))
    meter.evaluated(0.5)
    assert meter.report()["evaluated_s"] == 0.0
    at(1.0)
    begun = meter.begin_step()
    at(1.5)
    meter.end_step(begun, 16, 2.0, (0, 2))
    meter.evaluated(9.0)  # after the last step: no part of the time that `busy` is of
    found = meter.report()
    assert found["evaluated_s"] == 0.5
    assert found["busy"] == pytest.approx(0.5 / 1.5)
