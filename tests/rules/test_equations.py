"""The papers' equations: worked by hand, and properties that must hold for any vectors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.rules import averaging, elastic, mpca, outer, period, relay, staleness
from thinwire.rules.compression import CODECS

vectors = some.lists(some.floats(-100, 100, width=32), min_size=3, max_size=3).map(lambda v: torch.tensor(v))
shares = some.floats(0, 1)


def near(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=1e-3)


@given(vectors, vectors, vectors)
def test_a_mean_of_equals_is_each_of_them_and_lies_between_all(a: Tensor, b: Tensor, c: Tensor) -> None:
    assert near(averaging.mean([a, a, a]), a)
    found = averaging.mean([a, b, c])
    stacked = torch.stack([a, b, c])
    assert bool((found >= stacked.amin(0) - 1e-3).all())
    assert bool((found <= stacked.amax(0) + 1e-3).all())


@given(vectors, vectors, some.integers(1, 50), some.integers(1, 50))
def test_steps_as_weights_are_the_mean_over_steps(a: Tensor, b: Tensor, i: int, j: int) -> None:
    every_step = averaging.mean([a] * i + [b] * j)
    assert near(averaging.weighted_mean([a, b], [i, j]), every_step)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0]])
def test_weights_without_a_positive_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="at least one worker must count"):
        averaging.weighted_mean([torch.ones(1), torch.ones(1)], weights)


@given(vectors, vectors, vectors)
def test_the_mean_displacement_leads_from_the_joint_model_to_the_mean(z: Tensor, a: Tensor, b: Tensor) -> None:
    mean = averaging.mean([averaging.displacement(z, a), averaging.displacement(z, b)])
    assert near(outer.sgd(z, mean, 1.0), averaging.mean([a, b]))


@given(vectors, vectors, shares)
def test_an_elastic_exchange_keeps_the_sum_of_both(x: Tensor, z: Tensor, pull: float) -> None:
    after = elastic.pull_replica(x, z, pull) + elastic.pull_joint(z, x, pull)
    assert near(after, x + z)


def test_easgd_by_hand() -> None:
    x, z = torch.tensor([10.0]), torch.tensor([2.0])
    assert elastic.pull_replica(x, z, 0.25).item() == 8.0  # 10 − ¼·8
    assert elastic.pull_joint(z, x, 0.25).item() == 4.0  # 2 + ¼·8
    assert elastic.symmetric_pull(8) == pytest.approx(0.1125)


def test_mpca_by_hand() -> None:
    joint, mean = torch.tensor([1.0]), torch.tensor([3.0])
    model = mpca.blend(joint, mean, 0.9)
    assert model.item() == pytest.approx(2.8)  # 0.1·1 + 0.9·3
    velocity = mpca.trajectory(torch.tensor([0.5]), model, joint, 0.8)
    assert velocity.item() == pytest.approx(0.76)  # 0.8·0.5 + 0.2·1.8
    target = mpca.extrapolate(model, velocity, 0.7)
    assert target.item() == pytest.approx(3.332)  # 2.8 + 0.7·0.76
    assert mpca.pull_replica(torch.tensor([4.0]), target, 0.05).item() == pytest.approx(3.9666)
    assert mpca.penalty_gradient(torch.tensor([4.0]), target, 0.05).item() == pytest.approx(0.0334)


@given(vectors, vectors, shares)
def test_the_pull_of_equation_7_is_a_gradient_step_on_the_penalty_of_equation_6(
    x: Tensor, target: Tensor, pull: float
) -> None:
    assert near(mpca.pull_replica(x, target, pull), x - mpca.penalty_gradient(x, target, pull))


def test_the_pull_may_write_where_it_reads() -> None:
    x = torch.tensor([4.0, 0.0])
    mpca.pull_replica(x, torch.zeros(2), 0.25, out=x)
    assert x.tolist() == [3.0, 0.0]


def test_a_joint_model_that_moves_evenly_is_extrapolated_to_its_next_position() -> None:
    velocity, joint = torch.zeros(1), torch.zeros(1)
    for _ in range(60):
        moved = joint + 2.0
        velocity = mpca.trajectory(velocity, moved, joint, 0.8)
        joint = moved
    assert mpca.extrapolate(joint, velocity, 1.0).item() == pytest.approx(joint.item() + 2.0, abs=1e-3)


@given(some.integers(0, 200))
def test_mpca_s_schedules_never_leave_their_ranges_and_move_one_way(cycle: int) -> None:
    assert 0.9 <= mpca.blend_schedule(cycle + 1) <= mpca.blend_schedule(cycle) <= 1.0
    assert 0.0 <= mpca.lookahead_schedule(cycle) <= mpca.lookahead_schedule(cycle + 1) <= 0.7
    assert mpca.pull_schedule(0) == 0.0
    if cycle >= 1:
        assert 0.05 <= mpca.pull_schedule(cycle + 1) <= mpca.pull_schedule(cycle) <= 0.5
    assert mpca.pull_schedule(cycle, peak=0.1, end=0.3, free_cycles=0) == 0.3


def test_the_blend_falls_by_a_constant_factor() -> None:
    values = [mpca.blend_schedule(c) for c in range(21)]
    ratios = [b / a for a, b in itertools.pairwise(values)]
    assert max(ratios) - min(ratios) < 1e-9


def test_diloco_s_outer_step_by_hand_twice() -> None:
    z, m, d = torch.tensor([10.0]), torch.tensor([0.0]), torch.tensor([1.0])
    z, m = outer.nesterov(z, m, d, lr=0.7, decay=0.9)
    assert (z.item(), m.item()) == (pytest.approx(8.67), pytest.approx(1.0))  # 10 − 0.7(1 + 0.9·1)
    z, m = outer.nesterov(z, m, d, lr=0.7, decay=0.9)
    assert (z.item(), m.item()) == (pytest.approx(6.773), pytest.approx(1.9))  # − 0.7(1 + 0.9·1.9)


@given(vectors, vectors)
def test_an_outer_step_without_momentum_is_plain(z: Tensor, d: Tensor) -> None:
    moved, momentum = outer.nesterov(z, torch.zeros(3), d, lr=0.5, decay=0.0)
    assert near(moved, outer.sgd(z, d, 0.5))
    assert near(momentum, d)


@given(vectors, vectors, some.floats(0.01, 1.0))
def test_slowmo_without_momentum_is_the_mean_whatever_the_inner_rate(z: Tensor, d: Tensor, inner: float) -> None:
    moved, _ = outer.slowmo(z, torch.zeros(3), d, lr=1.0, decay=0.0, inner_lr=inner)
    assert torch.allclose(moved, z - d, rtol=1e-3, atol=1e-2)


@given(vectors, vectors, vectors, vectors)
def test_landing_keeps_the_steps_made_meanwhile(s: Tensor, steps: Tensor, z: Tensor, more: Tensor) -> None:
    landed = staleness.land(s + steps, s, z)
    assert near(landed - z, steps)
    assert near(staleness.land(s, s, z), z)


@given(vectors, vectors)
def test_mixing_keeps_all_or_nothing_at_its_ends(x: Tensor, z: Tensor) -> None:
    assert near(staleness.mix(x, z, 1.0), x)
    assert near(staleness.mix(x, z, 0.0), z)


def test_the_period_of_mpca_s_table_1() -> None:
    table = {"ResNet-110": (1.1, 0.095, 58), "VGG-A": (51.1, 0.474, 539), "ResNet-34": (9.2, 0.582, 79)}
    for exchange_s, step_s, suggested in table.values():
        assert period.balanced_period(exchange_s, step_s) == pytest.approx(suggested, abs=1)


@given(some.floats(0, 0.5), some.floats(1e6, 1e9))
def test_a_link_is_found_again_from_its_own_times(latency_s: float, bytes_per_s: float) -> None:
    link = period.Link(latency_s, bytes_per_s)
    sizes = [1e6, 4e6, 9e6]
    found = period.fit_link(sizes, [link.seconds(s) for s in sizes])
    assert found.seconds(5e6) == pytest.approx(link.seconds(5e6), rel=1e-6)


def test_a_link_on_which_size_does_not_matter_has_only_latency() -> None:
    found = period.fit_link([1e6, 4e6], [0.3, 0.3])
    assert found.bytes_per_s == math.inf
    assert found.seconds(1e9) == pytest.approx(0.3)


@given(some.floats(0, 100), some.sampled_from([1, 2, 4]))
def test_relay_s_fragments_fit_inside_a_step_where_a_round_takes_no_time_beside_its_bytes(
    ratio: float, bits: int
) -> None:
    _, count = relay.freshest(ratio, (bits,))
    assert 1 <= count <= 64
    assert ratio * (bits + 1 / 8) / 32 / count <= 0.95 + 1e-6
    assert relay.round_steps(ratio, bits, count) == 1
    assert count == 1 or relay.round_steps(ratio, bits, count - 1) > 1, "and there are no more than that takes"
    assert relay.exchange_ratio(ratio * 0.1, 0.1) == pytest.approx(ratio)


@given(some.floats(0, 5000), some.floats(0, 20), some.integers(1, 8), some.integers(1, 100))
def test_no_setting_of_as_many_bits_is_younger_than_the_freshest(
    ratio: float, latency: float, least: int, workers: int
) -> None:
    bits, count = relay.freshest(ratio, workers=workers, latency=latency, least=least)
    chosen = relay.age(ratio, bits, count, latency=latency)
    for other in relay.PACKED:
        ages = [relay.age(ratio, other, n, latency=latency) for n in range(least, 65)]
        if other == bits:
            assert chosen == min(ages)
        assert chosen <= (1 + relay.NOISE / workers) * min(ages)


@given(some.floats(0, 7.2), some.integers(2, 200))
def test_what_crosses_within_a_step_keeps_its_bits(ratio: float, workers: int) -> None:
    assert relay.freshest(ratio, workers=workers) == (4, 1)


def test_few_bits_are_for_slow_links_and_many_workers() -> None:
    """The more workers, the less noise their mean has; and one bit beats two where both need many fragments."""
    assert relay.freshest(64, workers=8)[0] == 2
    assert relay.freshest(16, workers=8) == (2, 2)
    assert relay.freshest(16, workers=32) == (1, 1)
    assert relay.freshest(256, workers=32) == (1, 10)


def test_fragments_that_are_given_leave_the_codec_that_is_freshest_with_them() -> None:
    assert relay.freshest(10, least=9, most=9) == (4, 9)
    assert relay.freshest(64, least=3, most=3) == (1, 3)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_what_a_codec_leaves_of_a_gaussian_is_what_the_rule_takes_it_for(bits: int) -> None:
    chosen = next(each for each in CODECS.values() if each.bits == bits)
    values = torch.randn(256_000, generator=torch.Generator().manual_seed(0))
    left = chosen.decode(chosen.encode(values), len(values)) - values
    assert float(left.square().mean() / values.square().mean()) == pytest.approx(relay.LEFT[bits], rel=0.03, abs=1e-3)


@given(some.integers(1, 64), some.integers(1, 64))
def test_outer_momentum_is_for_fragments_that_come_round_seldom_over_many_workers(steps: int, workers: int) -> None:
    assert (relay.choose_momentum(steps, workers) > 0) == (steps >= 5 and workers >= 8)
