"""What `bench comparison` makes of its runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.comparison import busy, choice, judge, last_loss, race, reached, stepping, to_target

RACE = race(10, "100mbit", 256, 64, target=0.5, steps=100)


def ran(step_s: float, *losses: float) -> dict[str, Any]:
    """Evaluations every ten steps."""
    history = [{"steps": 10 * n, "seconds": 10 * n * step_s, "val_loss": loss} for n, loss in enumerate(losses, 1)]
    return {"history": history, "seconds": 100 * step_s, "steps": 100, "busy": 0.98}


def test_a_target_that_is_not_reached_takes_for_ever() -> None:
    good, bad = ran(0.1, 0.9, 0.4, 0.6), ran(0.1, 0.9, 0.8, 0.7)
    assert to_target(RACE, good) == (pytest.approx(2.0), 20, True)
    assert reached(RACE, good) == pytest.approx(2.0)
    assert to_target(RACE, bad) == (pytest.approx(10.0), 100, False)
    assert reached(RACE, bad) == math.inf


def test_who_never_comes_there_is_not_ahead_by_having_stepped_quickly() -> None:
    found = {"relay": ran(0.01, 0.9, 0.8), "auto": ran(0.01, 0.9, 0.8), "ddp": ran(1.0, 0.9, 0.4), "mpca": ran(1, 0.4)}
    rows = {row.name: row for row in judge(RACE, found)}
    assert rows["faster than ddp"].value == 0.0
    assert rows["against the best"].value == math.inf
    found |= {"relay": ran(0.01, 0.9, 0.4)}
    rows = {row.name: row for row in judge(RACE, found)}
    assert rows["faster than ddp"].value == pytest.approx(100.0)
    assert rows["faster than mpca"].value == pytest.approx(50.0)


def test_the_last_loss_is_that_of_the_last_fifty_steps() -> None:
    assert last_loss(ran(0.1, *[9.0] * 5, *[0.5] * 5)) == pytest.approx(0.5)
    assert last_loss({"history": [{"steps": 50, "val_loss": 9.0}, {"steps": 100, "val_loss": 0.3}]}) == 0.3


def test_of_several_seeds_the_one_in_the_middle_counts() -> None:
    run = ran(0.1, 0.9, 0.4) | {"again": [ran(0.1, 0.4), ran(0.1, 0.9, 0.9, 0.9)]}
    assert to_target(RACE, run) == (pytest.approx(2.0), 20, True)
    run["again"][0] = ran(0.1, 0.8, 0.8)
    assert reached(RACE, run) == math.inf
    assert last_loss(run) == pytest.approx((0.65 + 0.8 + 0.9) / 3)


def test_busy_is_what_steps_alone_would_take_over_what_was_taken() -> None:
    assert busy(RACE, {"steps": 100, "seconds": 200 * RACE.step_s}) == pytest.approx(0.5)


def test_shares_leave_evaluations_out() -> None:
    run = {"steps": 100, "seconds": 250 * RACE.step_s, "evaluated_s": 50 * RACE.step_s, "busy": 0.6}
    assert busy(RACE, run) == pytest.approx(0.5)
    assert stepping(run) == pytest.approx(0.75)


@pytest.mark.parametrize("text", ["relais", "relay:x", "relay:0", "relay;auto"])
def test_a_wrong_choice_of_methods_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="ddp powersgd"):
        choice(text)
