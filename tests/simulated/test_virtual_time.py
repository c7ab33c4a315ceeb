"""The clock that jumps, and the network that takes time in it."""

from __future__ import annotations

import functools
import queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.network import Network, fair_rates
from thinwire.cluster.simulated.steps import StepTimes
from thinwire.errors import TimedOutError
from thinwire.rules.period import Link

MB = 1_000_000


def test_fibers_take_turns_in_the_order_of_their_moments() -> None:
    time, said = VirtualTime(), []

    def speak(name: str, pauses: list[float]) -> None:
        for pause in pauses:
            time.sleep(pause)
            said.append((name, time.now()))

    spoken = {"a": [1.0, 2.0], "b": [2.0, 0.5]}
    fibers = [time.fiber(functools.partial(speak, name, pauses), name, name) for name, pauses in spoken.items()]
    for fiber in fibers:
        fiber.start()
    for fiber in fibers:
        fiber.join(10.0)
    assert said == [("a", 1.0), ("b", 2.0), ("b", 2.5), ("a", 3.0)]
    assert time.now() == 3.0


def test_a_queue_wakes_its_reader_and_gives_up_at_its_deadline() -> None:
    time = VirtualTime()
    box, heard = time.queue(), []

    def read() -> None:
        heard.append((box.get(timeout=5.0), time.now()))
        with pytest.raises(queue.Empty):
            box.get(timeout=2.0)
        heard.append(("nothing", time.now()))

    reader = time.fiber(read, "reader", "reader")
    reader.start()
    time.sleep(1.5)
    box.put("word")
    reader.join(10.0)
    assert reader.error is None
    assert heard == [("word", 1.5), ("nothing", 3.5)]


def test_a_killed_fiber_ends_where_it_waits_and_a_frozen_one_goes_on_later() -> None:
    time, ended = VirtualTime(), []

    def live(name: str) -> None:
        try:
            time.sleep(10.0)
        finally:
            ended.append((name, time.now()))

    doomed, resting = time.fiber(lambda: live("doomed"), "d", "d"), time.fiber(lambda: live("resting"), "r", "r")
    doomed.start()
    resting.start()
    time.sleep(1.0)
    time.kill("d")
    time.freeze("r", 20.0)
    resting.join(100.0)
    assert ended == [("doomed", 1.0), ("resting", 21.0)]
    assert not doomed.is_alive()
    assert doomed.error is None


def test_where_nothing_is_left_to_happen_it_says_so() -> None:
    time = VirtualTime()
    time.fiber(time.park, "waits", "w").start()
    with pytest.raises(TimedOutError, match="1 fibers wait forever"):
        time.park()
    time.stop()
    assert not time.fibers


def test_what_a_callback_raises_reaches_whoever_made_the_clock() -> None:
    time = VirtualTime()

    def fail() -> None:
        raise RuntimeError("in between")

    time.at(1.0, fail)
    with pytest.raises(RuntimeError, match="in between"):
        time.sleep(2.0)


# -- the network ------------------------------------------------------------------------------------------------------


def arrivals(sends: list[tuple[int, int, int]], *, nodes: int = 4, latency_s: float = 0.0) -> dict[int, float]:
    """When each of these (source, target, bytes), all sent at once at 1 MB/s, has come."""
    time = VirtualTime()
    network, found = Network(time, Link(latency_s, 1.0 * MB), nodes), {}
    for index, (source, target, size) in enumerate(sends):
        network.send(source, target, size, lambda i=index: found.__setitem__(i, time.now()))  # type: ignore[misc]
    time.sleep(1000.0)
    return found


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    assert arrivals([(0, 1, 2 * MB)], latency_s=0.25) == {0: pytest.approx(2.25)}


def test_two_that_leave_one_node_share_its_link_and_so_do_two_that_come() -> None:
    assert arrivals([(0, 1, MB), (0, 2, MB)]) == {0: pytest.approx(2.0), 1: pytest.approx(2.0)}
    assert arrivals([(0, 2, MB), (1, 2, 2 * MB)]) == {0: pytest.approx(2.0), 1: pytest.approx(3.0)}


def test_what_comes_does_not_slow_down_what_goes() -> None:
    assert arrivals([(0, 1, MB), (1, 0, MB)]) == {0: pytest.approx(1.0), 1: pytest.approx(1.0)}


def test_messages_of_one_connection_keep_their_order_and_a_small_one_does_not_pass_a_large_one() -> None:
    found = arrivals([(0, 1, 3 * MB), (0, 1, 100), (0, 2, 100)])
    assert found[1] >= found[0] == pytest.approx(3.0)
    assert found[2] == pytest.approx(1e-4)


def test_all_to_all_takes_what_one_node_has_to_send() -> None:
    nodes = 8
    sends = [(i, j, MB) for i in range(nodes) for j in range(nodes) if i != j]
    assert list(arrivals(sends, nodes=nodes).values()) == pytest.approx([7.0] * len(sends))


def test_a_node_that_is_cut_off_neither_sends_nor_hears_until_it_is_healed() -> None:
    time = VirtualTime()
    network, came = Network(time, Link(0.0, 1.0 * MB), 3), {}
    network.send(0, 1, 2 * MB, lambda: came.__setitem__("large", time.now()))
    time.sleep(1.0)
    network.cut(1, 10.0)
    network.send(2, 1, 10, lambda: came.__setitem__("small", time.now()))
    network.send(0, 2, MB, lambda: came.__setitem__("other", time.now()))
    time.sleep(100.0)
    assert came["large"] == pytest.approx(12.0, abs=1e-3)
    assert came["small"] == pytest.approx(11.0, abs=1e-3)
    assert came["other"] == pytest.approx(2.0, abs=1e-3)


def test_a_link_that_becomes_slower_slows_down_what_is_under_way() -> None:
    time = VirtualTime()
    network, came = Network(time, Link(0.0, 1.0 * MB), 2), []
    network.send(0, 1, 2 * MB, lambda: came.append(time.now()))
    time.sleep(1.0)
    network.set_speed(0.1 * MB)
    time.sleep(100.0)
    assert came == [pytest.approx(11.0)]


@pytest.mark.parametrize("speed", [125e6, 1.25e9, 12.5e9])
def test_late_in_a_long_run_messages_still_come(speed: float) -> None:
    time = VirtualTime()
    time.sleep(1e6)
    network, came = Network(time, Link(0.0, speed), 3), []
    for size in (1_000_003, 777_777, 5_000_000):
        network.send(0, 1, size, lambda: came.append(time.now()))
        network.send(0, 2, size + 1, lambda: came.append(time.now()))
    time.sleep(10.0)
    assert len(came) == 6


def test_what_is_on_its_way_to_a_node_that_dies_does_not_hold_up_its_successor() -> None:
    time = VirtualTime()
    network, came = Network(time, Link(0.0, 1.0 * MB), 3), []
    network.send(0, 1, 20 * MB, lambda: came.append(("old", time.now())))
    time.sleep(1.0)
    network.drop(1)
    network.send(0, 1, MB, lambda: came.append(("new", time.now())))
    time.sleep(100.0)
    assert came == [("new", pytest.approx(2.0))]


def test_two_cuts_that_overlap_heal_when_the_later_ends() -> None:
    time = VirtualTime()
    network, came = Network(time, Link(0.0, 1.0 * MB), 2), []
    network.cut(1, 10.0)
    time.sleep(8.0)
    network.cut(1, 10.0)
    network.send(0, 1, MB, lambda: came.append(time.now()))
    time.sleep(100.0)
    assert came == [pytest.approx(19.0)]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.booleans(), min_size=n * n, max_size=n * n),
            st.lists(st.floats(0.5, 10.0), min_size=n, max_size=n),
            st.lists(st.floats(0.5, 10.0), min_size=n, max_size=n),
        )
    )
)
def test_shares_are_fair_and_use_what_is_there(drawn: tuple[list[bool], list[float], list[float]]) -> None:
    """Every connection has an end with nothing left, at which no other connection has more."""
    flags, ups, downs = drawn
    n = len(ups)
    active = np.array(flags).reshape(n, n)
    up, down = np.array(ups), np.array(downs)
    rates = fair_rates(active, up, down)
    assert (rates[~active] == 0).all()
    assert (rates.sum(1) <= up * (1 + 1e-6)).all()
    assert (rates.sum(0) <= down * (1 + 1e-6)).all()
    for i, j in np.argwhere(active):
        full_up = rates[i].sum() >= up[i] * (1 - 1e-6) and rates[i, j] >= rates[i].max() * (1 - 1e-6)
        full_down = rates[:, j].sum() >= down[j] * (1 - 1e-6) and rates[i, j] >= rates[:, j].max() * (1 - 1e-6)
        assert full_up or full_down


# -- step times -------------------------------------------------------------------------------------------------------


def times(**given: object) -> StepTimes:
    settings: dict[str, object] = {
        "step_s": 0.5, "ratio": None, "link": Link(0.0, 1e6), "spread": 0.0, "slow": {}, "contention": 0.0,
        "busy": lambda worker: False, "seed": 0,
    }  # fmt: skip
    return StepTimes(**(settings | given))  # type: ignore[arg-type]


def test_step_times_are_constant_unless_told_and_slower_where_told() -> None:
    steps = times(slow={1: 2.0}, contention=0.5, busy=lambda worker: worker == 2)
    assert [steps.draw(0), steps.draw(1), steps.draw(2)] == [0.5, 1.0, 0.75]


def test_drawn_step_times_have_the_mean_and_spread_asked_for_and_repeat_with_the_seed() -> None:
    drawn = np.array([times_.draw(0) for times_ in [times(spread=0.3)] for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(0.5, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(0.3, rel=0.05)
    again, other = times(spread=0.3), times(spread=0.3)
    assert [again.draw(w) for w in (0, 1, 0)] == [other.draw(w) for w in (0, 1, 0)]
    assert times(spread=0.3, seed=1).draw(0) != times(spread=0.3).draw(0)


def test_a_ratio_says_in_how_many_steps_the_model_crosses_the_link() -> None:
    steps = times(step_s=None, ratio=8.0)
    assert not steps.known
    steps.settle(500_000, lambda: pytest.fail("it need not be measured"))
    assert steps.step_s == pytest.approx(2 * 4 * 500_000 / 1e6 / 8.0)
