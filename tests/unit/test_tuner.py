"""What the first worker makes of the rounds it has seen."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.engine.tuner import Tuner
from thinwire.rules.period import Link


def tuner() -> Tuner:
    worker: Any = SimpleNamespace(lead=False)
    fresh = Tuner(worker)
    fresh.see(SimpleNamespace(size_bytes=8e4, seconds=60.0, round=0))  # type: ignore[arg-type]
    return fresh


def see(tuner: Tuner, link: Link, sizes: list[float]) -> None:
    for size in sizes:
        tuner.see(SimpleNamespace(size_bytes=size, seconds=link.seconds(size), round=1))  # type: ignore[arg-type]


def test_the_first_round_waits_for_whoever_starts_last_and_is_no_measure() -> None:
    found = tuner()
    see(found, Link(0.01, 1e6), [8e4, 2e4, 2e4])
    assert found._link().latency_s == pytest.approx(0.01)


def test_many_rounds_of_one_size_do_not_make_it_forget_what_another_size_took() -> None:
    """Else all of it would pass for latency, or for bytes, by the noise in nearly equal sizes."""
    link, found = Link(0.01, 1e6), tuner()
    see(found, link, [8e4, 8e4, 2e4, 2e4])
    see(found, link, [20_100.0, 19_900.0] * 200)
    assert found._link().latency_s == pytest.approx(0.01, rel=0.05)
    assert found._link().bytes_per_s == pytest.approx(1e6, rel=0.05)


def test_sizes_that_are_nearly_one_tell_nothing_of_latency() -> None:
    found = tuner()
    see(found, Link(0.0, 1e6), [61_380.0, 62_304.0] * 40)
    assert found._link().latency_s == 0.0
    assert found._link().bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_a_link_that_changes_is_learnt_anew() -> None:
    found = tuner()
    see(found, Link(0.0, 1e7), [8e4] * 4 + [2e4] * 30)
    see(found, Link(0.0, 1e6), [2e4] * 30)
    assert found._link().bytes_per_s == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("late", range(5))
def test_one_round_that_met_with_something_else_says_nothing_of_the_wire(late: int) -> None:
    found, link = tuner(), Link(0.0, 1e6)
    for number, size in enumerate([2e4] * 2 + [4e4] * 3):
        see(found, Link(1.0, 1e6) if number == late else link, [size])
    see(found, link, [16e4] * 6)
    assert found._link().bytes_per_s == pytest.approx(1e6, rel=0.3)


def test_rounds_that_last_by_chance_say_nothing_of_the_wire() -> None:
    chance, limited = random.Random(0), 0
    for _ in range(200):
        found = tuner()
        for size in [2e3] * 2 + [4e3] * 3 + [1e3] * 20:
            see(found, Link(chance.uniform(0.002, 0.02), 1e9), [size])
        limited += found._link().bytes_per_s < 1e7
    assert limited < 20


def test_a_new_generation_s_first_round_is_no_measure_either() -> None:
    found = tuner()
    see(found, Link(0.01, 1e6), [8e4, 2e4, 2e4])
    found.first = -1
    see(found, Link(30.0, 1e6), [2e4])
    assert found._link().latency_s == pytest.approx(0.01)


def test_a_machine_that_becomes_busy_is_not_taken_for_a_slow_wire() -> None:
    """Every round takes ten times as long, large or small: there is nothing to gain by sending less."""
    found = tuner()
    see(found, Link(0.002, 1e9), [8e4] * 4 + [2e4] * 30)
    see(found, Link(0.02, 1e9), [2e4] * 30)
    assert found._link().latency_s == pytest.approx(0.02, rel=0.1)
    assert found._link().bytes_per_s > 1e7
