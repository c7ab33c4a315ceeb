"""What the first worker makes of the rounds it has seen."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.exchange.cuts import Cut, Cuts
from thinwire.parameters import FlatParameters
from thinwire.rules.period import Link
from thinwire.strategies import Auto, Measured, Relay, Setting, SparkNet
from thinwire.transport.ports import Traffic
from thinwire.worker.shares import Shares
from thinwire.worker.tuner import Tuner
from thinwire.worker.wire_meter import WireMeter


def parts(*, lead: bool, traffic: Callable[[], Traffic | None], **local: Any) -> dict[str, Any]:
    """What a tuner is made of, as much of it as it looks at."""
    return {
        "plan": SimpleNamespace(codec="float32"),
        "local": SimpleNamespace(**{"strategy": None, "joint": None, "meter": None, **local}),
        "generation": SimpleNamespace(lead=lead, members=range(4)),
        "exchange": SimpleNamespace(traffic=traffic),
        "reports": SimpleNamespace(event=lambda kind, **fields: None),
        "verdict": str,
        "batches_per_epoch": 0,
    }


def tuner() -> Tuner:
    fresh = Tuner(**parts(lead=False, traffic=lambda: None))
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


class Loop:
    """A tuner whose settings are followed, on a link that may change as rounds go by."""

    def __init__(self, strategy: Relay, *, size: int = 1_000_000, step_s: float = 0.05) -> None:
        self.size, self.chance = size, random.Random(0)
        first = strategy.setting(Measured(size, 4, 0, None, None), None)
        self.cuts = Cuts(Cut(size, first))
        self.meter = SimpleNamespace(steps=0, step_s=step_s, handling_s=0.0)
        joint = SimpleNamespace(cuts=self.cuts, size=size)
        made = parts(lead=True, traffic=lambda: self.traffic(), strategy=strategy, joint=joint, meter=self.meter)
        made["local"].shares = Shares()
        made["reports"].event = lambda kind, **fields: self.said.append(fields) if kind == "setting_changed" else None
        self.said: list[dict[str, Any]] = []
        self.tuner, self.round = Tuner(**made), 0

    def traffic(self) -> Traffic | None:
        return None

    def play(self, rounds: int, link: Link) -> Setting:
        """So many rounds, of which each takes up to a fifth longer by chance; the setting in force then."""
        for _ in range(rounds):
            said = self.tuner.note(self.round)
            if "setting" in said:
                self.cuts.change(Setting(**said["setting"]), said["since"])
            cut = self.cuts.at(self.round)
            values = 2 * cut.fragment(self.round).size * 3 / 4
            size = values * (BITS[cut.setting.codec] + 1 / 8) / 8
            seconds = link.seconds(size) * self.chance.uniform(1.0, 1.2)
            fields = {"round": self.round, "size_bytes": size, "seconds": seconds, "notes": {}, "fragment": None}
            self.tuner.see(SimpleNamespace(**fields))  # type: ignore[arg-type]
            self.round += 1
        return self.cuts.newest.setting


BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "sign2": 2, "sign1": 1, None: 32}
TEN = Link(0.002, 12e6)
"""An exchange takes about ten steps."""


@pytest.mark.parametrize("strategy", [Relay(), Auto()], ids=str)
@pytest.mark.parametrize("rounds", [4, 6, 8, 12, 20])
def test_a_start_on_busy_machines_is_not_held_against_the_link_for_long(strategy: Relay, rounds: int) -> None:
    quiet, busy = Loop(strategy), Loop(strategy)
    busy.play(rounds, Link(0.02, 1.2e6))
    assert busy.play(120 - rounds, TEN) == quiet.play(120, TEN)


@pytest.mark.parametrize("later", [Link(0.002, 1.2e6), Link(0.002, 120e6), Link(0.04, 12e6)], ids=str)
def test_after_a_change_it_chooses_as_if_the_link_had_always_been_so(later: Link) -> None:
    changed, always = Loop(Relay()), Loop(Relay())
    changed.play(210, TEN)
    changed.play(300, later)
    expected = always.play(510, later)
    found = changed.cuts.newest.setting
    assert found.codec == expected.codec
    assert found.fragments == pytest.approx(expected.fragments, abs=1 + 0.2 * expected.fragments)


def test_a_machine_that_becomes_busy_is_not_taken_for_a_slow_wire() -> None:
    """Every round takes ten times as long, large or small: there is nothing to gain by sending less."""
    loop = Loop(Auto())
    assert loop.play(100, Link(0.001, 1e9)).codec == "float32"
    assert loop.play(80, Link(0.01, 1e9)).codec == "float32"


def test_looking_again_takes_few_rounds_and_ever_fewer() -> None:
    loop = Loop(Relay())
    looked = [loop.play(1, TEN).fragments for _ in range(2000)]
    usual = max(set(looked), key=looked.count)
    assert sum(found != usual for found in looked[100:]) < 60
    assert sum(found != usual for found in looked[500:]) < 16


@pytest.mark.parametrize("strategy", [Relay(bits=4, fragments=4), SparkNet(period=5)], ids=str)
def test_where_nothing_is_free_nothing_is_tried(strategy: Relay) -> None:
    loop = Loop(strategy)
    before = loop.cuts.newest
    loop.play(300, TEN)
    assert loop.cuts.newest == before


def test_with_fragments_given_the_codec_is_tried() -> None:
    loop = Loop(Relay(fragments=4))
    assert {loop.play(1, TEN).codec for _ in range(100)} == {"int4", "int8"}
    assert loop.play(100, TEN).fragments == 4


class Counted(Loop):
    """Rounds on sockets that count, on machines that are busy, uneven, and wait for each other."""

    def __init__(self, strategy: Relay, *, tick_s: float = 0.004, **given: Any) -> None:
        super().__init__(strategy, **given)
        self._sent, self._busy_s, self._tick_s, self._trip_s = 0, 0.0, tick_s, 0.0

    def traffic(self) -> Traffic:
        busy_s = self._busy_s
        if self._tick_s:  # as the kernel counts: whole ticks, of which one more or less has begun
            busy_s = self._tick_s * int(busy_s / self._tick_s + self.chance.random())
        return Traffic(self._sent, busy_s, self._trip_s, self._trip_s, self._tick_s)

    def play(self, rounds: int, link: Link, *, others_s: float = 0.0, per_byte_s: float = 0.0) -> Setting:
        """Each round takes beside the wire what processors take for its bytes, and up to `others_s` by chance."""
        self._trip_s = link.latency_s
        for _ in range(rounds):
            said = self.tuner.note(self.round)
            if "setting" in said:
                self.cuts.change(Setting(**said["setting"]), said["since"])
            cut = self.cuts.at(self.round)
            values = 2 * cut.fragment(self.round).size * 3 / 4
            size = int(values * (BITS[cut.setting.codec] + 1 / 8) / 8)
            self._sent += size
            self._busy_s += size / link.bytes_per_s * self.chance.uniform(0.9, 1.1) + 2 * link.latency_s
            seconds = link.seconds(size) + 4 * values * per_byte_s + self.chance.uniform(0.0, others_s)
            self.meter.step_s = 0.05 * self.chance.uniform(0.9, 1.1)
            fields = {"round": self.round, "size_bytes": size, "seconds": seconds, "notes": {}, "fragment": None}
            self.tuner.see(SimpleNamespace(**fields))  # type: ignore[arg-type]
            self.round += 1
        return self.cuts.newest.setting


def rate(mbit: float, latency_s: float = 2e-4) -> Link:
    return Link(latency_s, mbit * 125e3)


BUSY = [{}, {"others_s": 0.2}, {"per_byte_s": 1e-7}, {"others_s": 0.05, "per_byte_s": 2e-8}]
"""What machines take beside the wire: nothing; up to four steps for peers; ten times what a gigabit takes; both."""


@pytest.mark.parametrize("busy", BUSY, ids=str)
@pytest.mark.parametrize("mbit", [10, 20, 50, 100, 200, 500, 1000])
@pytest.mark.parametrize("strategy", [Relay(), Auto()], ids=str)
def test_the_wire_is_known_within_a_factor_of_two_and_one_setting_is_held(
    strategy: Relay, mbit: float, busy: dict[str, float]
) -> None:
    loop = Counted(strategy)
    loop.play(1000, rate(mbit), **busy)
    measured = [said["bytes_per_s"] for said in loop.said]
    assert measured
    assert all(each is not None and mbit / 2 < each * 8e-6 < mbit * 2 for each in measured)
    assert len({str(said["setting"]) for said in loop.said}) <= 2


@pytest.mark.parametrize("mbit", [10, 100, 1000])
def test_busy_machines_are_given_the_codec_of_the_same_wire_between_idle_ones(mbit: float) -> None:
    for strategy in (Relay(), Auto()):
        idle, busy = Counted(strategy), Counted(strategy)
        expected = idle.play(300, rate(mbit))
        found = busy.play(300, rate(mbit), others_s=0.05, per_byte_s=2e-8)
        assert found.codec == expected.codec


def test_a_round_trip_is_not_taken_for_a_slow_wire() -> None:
    loop = Counted(Relay(), step_s=0.5)
    loop.play(300, rate(100, latency_s=0.02))
    assert 50 < loop.said[-1]["bytes_per_s"] * 8e-6 < 200


@pytest.mark.parametrize(("before", "after"), [(1000, 10), (10, 1000), (100, 30)])
def test_another_wire_is_noticed_and_the_setting_changed_once_for_it(before: float, after: float) -> None:
    for strategy in (Relay(), Auto()):
        loop, always = Counted(strategy), Counted(strategy)
        loop.play(400, rate(before))
        held = len(loop.said)
        changed, right = loop.play(600, rate(after)), always.play(600, rate(after))
        assert len(loop.said) - held <= 2
        assert 0.5 <= BITS[changed.codec] / BITS[right.codec] <= 2, "it changes as little as is certainly right"


def test_a_setting_at_the_border_of_two_is_held() -> None:
    """By chance in steps and in the wire an exchange is now more and now less than the 64 steps of the border."""
    values, step_s = 1_000_000, 0.05
    edge = 8 * values * 0.75 / (64 * step_s)
    for factor in (0.8, 0.9, 1.0, 1.1, 1.2):
        loop = Counted(Relay(bits="auto"))
        seen = {loop.play(1, Link(2e-4, edge * factor)).codec for _ in range(1500)}
        assert len(seen) <= 2
        assert len({said["setting"]["codec"] for said in loop.said}) == 1


def test_without_a_wire_nothing_is_changed_but_once() -> None:
    loop = Counted(Relay(), tick_s=0.0)
    loop.traffic = lambda: Traffic(0, 0.0)  # type: ignore[method-assign]
    loop.play(500, Link(0.0, 1e12), others_s=0.3, per_byte_s=1e-7)
    assert len(loop.said) == 1
    assert loop.said[0]["bytes_per_s"] is None
    assert loop.said[0]["why"].startswith("Processors, not the wire, are the limit: a round takes")


def test_nothing_is_certain_while_the_wire_changes() -> None:
    meter = WireMeter()
    for round in range(7):
        meter.read(round, Traffic(1000 * round, 0.001 * round if round < 4 else 0.003 + (round - 3) * 0.1))
    assert meter.bytes_per_s is None
    for round in range(7, 14):
        meter.read(round, Traffic(1000 * round, 0.003 + (round - 3) * 0.1))
    assert meter.bytes_per_s == pytest.approx(1e4)


@pytest.mark.parametrize("bytes_per_s", [60.0, 12.6e6, 1.4e8, math.inf])
@pytest.mark.parametrize("step_s", [1e-4, 0.5])
def test_what_is_said_of_a_link_has_no_absurd_figure(bytes_per_s: float, step_s: float) -> None:
    measured = Measured(1_000_000, 4, 100, Link(2e-4, bytes_per_s), step_s, rest_s=0.01)
    said = Relay().explain(measured, Setting(fragments=4, codec="int4"))
    assert not re.search(r"\b0 [kMG]?bit|e\+|inf|nan|\b0(\.0*)? steps", said), said
    assert said.endswith(" Sending displacements in 4 bits a value, 4 fragments in turn, in the background.")


def test_a_fast_link_is_explained_in_two_plain_sentences() -> None:
    measured = Measured(1_000_000, 4, 100, Link(2e-4, 125e6), 0.1)
    assert Relay().explain(measured, Setting(fragments=1, codec="int4")) == (
        "The link is fast (1 Gbit/s): one exchange of the whole model takes less than a step. "
        "Sending displacements in 4 bits a value in the background."
    )


def test_a_round_that_takes_long_beside_its_bytes_is_put_down_to_processors() -> None:
    measured = Measured(1_000_000, 4, 100, Link(2e-4, 125e6), 0.1, rest_s=0.05)
    said = Relay().explain(measured, Setting(fragments=2, codec="sign1", wait=True))
    assert said == (
        "Processors, not the wire, are the limit: a round takes 50 ms beside its bytes. "
        "Sending displacements in 1 bit a value, 2 fragments in turn, while steps wait."
    )


def test_it_is_said_that_gradients_are_sent() -> None:
    sends = Relay().with_optimizer(torch.optim.Adam)
    parameters = FlatParameters(torch.nn.Linear(2, 2))
    laid = sends.laid_out(parameters, lambda factory: factory(parameters.tensors))
    measured = Measured(1_000_000, 4, 100, Link(2e-4, 1.25e6), 0.1)
    assert laid.explain(measured, Setting(fragments=5, codec="sign2")) == (
        "The link carries 10 Mbit/s: one exchange of the whole model takes 48 steps of 100 ms. "
        "Sending gradients in 2 bits a value, 5 fragments in turn, in the background."
    )
