from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as some

from thinwire.exchange.cuts import Cut, Cuts
from thinwire.parameters import GRAIN
from thinwire.strategies import Setting


def three() -> Cuts:
    return Cuts(Cut(3000, Setting(fragments=3)))


@given(some.integers(1, 20), some.integers(0, 50), some.integers(1, 10_000))
def test_a_cycle_covers_the_model_once(count: int, cycle: int, size: int) -> None:
    cut = Cut(size, Setting(fragments=count))
    rounds = range(cycle * cut.count, (cycle + 1) * cut.count)
    assert {cut.cycle(r) for r in rounds} == {cycle}
    covered = sorted(cut.fragment(r) for r in rounds)
    assert covered[0].start == 0
    assert covered[-1].stop == size
    assert sum(f.size for f in covered) == size


@given(some.integers(1, 20), some.integers(0, 50), some.integers(1, 10_000))
def test_no_round_is_of_an_empty_fragment(count: int, round: int, size: int) -> None:
    """A peer refuses rounds of nothing: a model of few grains has fewer fragments than it was asked for."""
    cut = Cut(size, Setting(fragments=count))
    assert cut.fragment(round).size > 0
    assert cut.count == min(count, -(-size // GRAIN))


def test_a_change_holds_from_its_round_on_and_not_before() -> None:
    cuts = three()
    cuts.change(Setting(fragments=1), 7)
    assert cuts.at(6).setting.fragments == 3
    assert cuts.at(7).setting.fragments == 1
    assert cuts.at(7).fragment(7).size == 3000
    assert cuts.at(1000) is cuts.newest


def test_cycles_go_on_counting_over_a_change() -> None:
    cuts = three()
    cuts.change(Setting(fragments=2), 6)
    found = [cuts.at(r).cycle(r) for r in range(10)]
    assert found == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert found == sorted(found)


def test_the_same_change_counts_once() -> None:
    cuts = three()
    for _ in range(3):
        cuts.change(Setting(fragments=2), 6)
    assert len(cuts.to_json()) == 2


def test_a_change_to_what_already_holds_or_of_the_past_is_passed_over() -> None:
    cuts = three()
    cuts.change(Setting(fragments=3), 5)
    assert len(cuts.to_json()) == 1
    cuts.change(Setting(fragments=2), 6)
    cuts.change(Setting(fragments=4), 6)
    cuts.change(Setting(fragments=4), 2)
    assert [c["setting"]["fragments"] for c in cuts.to_json()] == [3, 2]


def test_a_round_in_flight_still_finds_its_cut_after_several_changes() -> None:
    cuts = three()
    for number, count in enumerate((2, 4, 5, 6, 7, 8), start=1):
        cuts.change(Setting(fragments=count), 10 * number)
        assert cuts.at(10 * number - 1).setting != cuts.newest.setting
        assert cuts.at(10 * number - 1).since <= 10 * number - 1


def test_cuts_go_through_json() -> None:
    cuts = three()
    cuts.change(Setting(fragments=2, codec="int4", momentum=0.3), 6)
    again = Cuts.from_json(json.loads(json.dumps(cuts.to_json())))
    assert again.to_json() == cuts.to_json()
    assert all(again.at(r) == cuts.at(r) for r in range(20))
