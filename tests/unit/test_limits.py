"""How long a worker takes steps, and when it may conclude."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.worker.generation import Generation
from thinwire.worker.life import Life
from thinwire.worker.limits import concludes, goes_on
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.step_statistics import StepStatistics


def of_two(rows: dict[int, int]) -> Generation:
    generation = Generation()
    generation.members, generation.rows_at_round = (0, 1), rows
    return generation


@pytest.mark.parametrize(
    ("rows", "expected"),
    [({0: 100, 1: 79}, True), ({0: 100, 1: 80}, False), ({0: 100}, True), ({}, False)],
)
def test_a_worker_whose_epochs_are_done_goes_on_while_another_lags_behind(rows: dict[int, int], expected: bool) -> None:
    plan = WorkerPlan(worker=0, attempt=0, epochs=2, steps=None, evaluates=False, beyond=2)
    meter = StepStatistics(lambda: 0.0)
    assert goes_on(plan, meter, of_two(rows), Life()), "its epochs are not done yet"
    meter.position = (2, 0)
    assert goes_on(plan, meter, of_two(rows), Life()) == expected


def test_a_worker_that_is_told_to_stop_takes_no_further_step() -> None:
    plan = WorkerPlan(worker=0, attempt=0, epochs=2, steps=9, evaluates=False)
    meter, life = StepStatistics(lambda: 0.0), Life()
    assert goes_on(plan, meter, of_two({}), life)
    life.stop()
    assert not goes_on(plan, meter, of_two({}), life)


def test_a_worker_concludes_once_it_has_all_rounds_that_the_coordinator_counts() -> None:
    life, generation = Life(), of_two({})
    rounds: Any = SimpleNamespace(landed=4)
    assert not concludes(life, generation, rounds, counts_rounds=True)
    life.num_rounds = 5
    assert not concludes(life, generation, rounds, counts_rounds=True)
    assert concludes(life, generation, rounds, counts_rounds=False)
    rounds.landed = 5
    assert concludes(life, generation, rounds, counts_rounds=True)
    generation.needs_state = True
    assert not concludes(life, generation, rounds, counts_rounds=True)
