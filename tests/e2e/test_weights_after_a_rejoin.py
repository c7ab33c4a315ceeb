"""How much a contribution counts that a replacement makes: by what it did itself (MPCA, Langer et al. 2018, eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.parameters import Fragment
from thinwire.strategies import Share, Strategy
from thinwire.worker.shares import Shares

STEP_S, BATCH, STEPS = 0.1, 8, 160
DIES_S = 8.0
MADE = int(DIES_S / STEP_S)
"""Steps of the worker that dies."""
seen: list[tuple[Share, float]] = []


@dataclass(frozen=True, kw_only=True)
class WatchedRelay(tw.Relay):
    def weight(self, share: Share) -> float:
        seen.append((share, super().weight(share)))
        return seen[-1][1]


@dataclass(frozen=True, kw_only=True)
class WatchedMPCA(tw.MPCA):
    def weight(self, share: Share) -> float:
        seen.append((share, super().weight(share)))
        return seen[-1][1]


@dataclass(frozen=True, kw_only=True)
class WatchedAuto(tw.Auto):
    def weight(self, share: Share) -> float:
        seen.append((share, super().weight(share)))
        return seen[-1][1]


@dataclass(frozen=True, kw_only=True)
class WatchedSparkNet(tw.SparkNet):
    def weight(self, share: Share) -> float:
        seen.append((share, super().weight(share)))
        return seen[-1][1]


@dataclass(frozen=True, kw_only=True)
class WatchedSynchronous(tw.Synchronous):
    def weight(self, share: Share) -> float:
        seen.append((share, super().weight(share)))
        return seen[-1][1]


WATCHED: list[Strategy] = [WatchedRelay(), WatchedMPCA(), WatchedAuto(), WatchedSparkNet(period=3)]
MORE: list[Strategy] = [WatchedRelay(fragments=4, bits=8), WatchedMPCA(fragments=1), WatchedSynchronous()]


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))


def run(strategy: Strategy, workers: int, *faults: tw.Fault, **more: Any) -> tw.Result:
    seen.clear()
    cluster = tw.Simulated(workers=workers, step_s=STEP_S, link="100mbit", faults=faults)
    return tw.fit(
        net, "digits", inputs=["pixels"], optimizer=lambda p: torch.optim.SGD(p, lr=0.05), strategy=strategy,
        cluster=cluster, steps=STEPS, batch_size=BATCH, progress=False, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    [*WATCHED, *(pytest.param(strategy, marks=pytest.mark.long) for strategy in MORE)],
    ids=lambda s: type(s).__name__,
)
def test_a_replacement_s_first_contributions_count_by_its_own_steps(strategy: Strategy) -> None:
    whole = run(strategy, 3)
    usual = max(share.steps for share, _ in seen)
    assert whole.summary["workers_lost"] == 0
    one = run(strategy, 3, tw.Fault(at_s=DIES_S, worker=1, seconds=1.0))
    assert one.summary["workers_lost"] == 1
    assert one.summary["steps"] >= STEPS - 1
    most = max(share.steps for share, _ in seen)
    assert most < MADE / 2, "nothing counts by what was done before the death"
    assert most <= 3 * usual + 10, "but by what was done since, with the time that a new generation takes"
    assert max(weight for _, weight in seen) <= most * BATCH


@pytest.mark.parametrize("strategy", [WatchedRelay(), WatchedMPCA()], ids=lambda s: type(s).__name__)
def test_a_worker_that_was_alone_counts_by_its_steps_since_there_is_another(strategy: Strategy) -> None:
    """What it did alone is the joint model that the other starts from."""
    found = run(strategy, 2, tw.Fault(at_s=2.0, worker=1, seconds=6.0))
    assert found.summary["workers_lost"] == 1
    assert max(share.steps for share, _ in seen) < 30, "it made 60 steps alone"


@pytest.mark.parametrize("strategy", [WatchedRelay(), WatchedMPCA()], ids=lambda s: type(s).__name__)
def test_a_group_with_a_new_member_counts_by_its_steps_since_it_came_together(strategy: Strategy) -> None:
    found = run(strategy, 4, tw.Fault(at_s=DIES_S, worker=1, seconds=1.0), placement=tw.Planned(group_size=2))
    assert found.summary["workers_lost"] == 1
    assert max(share.steps for share, _ in seen) < MADE / 2
    assert max(share.rows for share, _ in seen) < MADE / 2 * 2 * BATCH


def test_a_fragment_that_is_cut_anew_counts_by_what_has_waited_longest() -> None:
    shares = Shares()
    shares.start(100, 800)
    assert shares.take(Fragment(0, 512), 103, 824) == (3, 24)
    assert shares.take(Fragment(512, 1024), 104, 832) == (4, 32)
    assert shares.take(Fragment(0, 512), 105, 840) == (2, 16)
    assert shares.take(Fragment(256, 768), 110, 880) == (6, 48)
    assert shares.take(Fragment(0, 256), 111, 888) == (6, 48)
    assert shares.take(Fragment(0, 1024), 112, 896) == (8, 64)
    assert shares.take(Fragment(0, 1024), 113, 904) == (1, 8)
    again = Shares()
    again.load(shares.tree())
    assert again.take(Fragment(0, 1024), 115, 920) == (2, 16)


def test_a_fragment_of_which_a_part_was_never_contributed_counts_from_the_start() -> None:
    shares = Shares()
    shares.start(10, 80)
    shares.take(Fragment(0, 512), 15, 120)
    assert shares.take(Fragment(0, 1024), 17, 136) == (7, 56)
