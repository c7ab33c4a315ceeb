"""Fewer free slots than workers: training starts with those who are there and grows as slots appear."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events

from .conftest import LONGEST_S, Clusters, Slow, slots_taken

pytestmark = pytest.mark.timeout(900)


class Waits(Slow):
    """Steps slowly until a file is there."""

    def __init__(self, signal: str) -> None:
        super().__init__()
        self.signal = signal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not os.path.exists(self.signal):
            time.sleep(0.1)
        return self.layer(x)


GROWING = tw.Deadlines(silence_s=60.0, prepare_s=300.0, gather_s=8.0, start_s=600.0, rejoin_s=600.0, stall_s=300.0)
"""The first generation forms without those who do not come, however slow the machine is."""


def test_three_are_asked_two_slots_are_free_and_the_third_joins_later(spark: Any, digits: Any, tmp_path: Path) -> None:
    log: list[events.Event] = []
    fast = tmp_path / "fast"
    with slots_taken(spark, tmp_path, 1) as over:

        def watch(event: events.Event) -> None:
            log.append(event)
            if isinstance(event, events.Progressed) and event.steps >= 20:
                over.touch()
            if isinstance(event, events.GenerationFormed) and len(event.members) == 3:
                fast.touch()

        result = tw.fit(
            lambda: Waits(str(fast)),
            digits.select("pixels", "label"),
            inputs=["pixels"],
            strategy=tw.SparkNet(period=10),
            cluster=tw.Spark(workers=3, preflight=False),
            epochs=15,
            batch_size=16,
            deadlines=GROWING,
            callbacks=[watch],
            progress=False,
        )
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    assert len(formed[0]) <= 2, "there were two slots"
    assert (0, 1, 2) in formed
    assert result.summary["rows"] == 15 * 1797
    assert result.summary["workers_lost"] == 0


@pytest.mark.long
def test_a_worker_that_is_done_makes_room_for_one_that_found_no_slot(spark: Any, digits: Any, tmp_path: Path) -> None:
    log: list[events.Event] = []
    with slots_taken(spark, tmp_path, 1):
        result = tw.fit(
            lambda: nn.Linear(64, 10),
            digits.select("pixels", "label"),
            inputs=["pixels"],
            cluster=tw.Spark(workers=3, preflight=False),
            epochs=10,
            batch_size=16,
            deadlines=GROWING,
            callbacks=[log.append],
            progress=False,
        )
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    assert all(len(members) <= 2 for members in formed), "there never was a third slot"
    assert {worker for members in formed for worker in members} == {0, 1, 2}
    assert result.summary["rows"] == 10 * 1797
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == 0


@pytest.fixture
def none_at_first(clusters: Clusters) -> Iterator[Any]:
    """A cluster that asks for executors when there is work, and gives them back."""
    settings = {
        "enabled": "true",
        "shuffleTracking.enabled": "true",
        "initialExecutors": "0",
        "minExecutors": "0",
        "maxExecutors": "2",
        "executorIdleTimeout": "2s",
        "cachedExecutorIdleTimeout": "4s",
        "shuffleTracking.timeout": "4s",
    }
    clusters.stop()
    yield clusters.of("local-cluster[2,1,1024]", **{f"spark.dynamicAllocation.{k}": v for k, v in settings.items()})
    clusters.stop()


@pytest.mark.long
def test_executors_come_by_dynamic_allocation(none_at_first: Any) -> None:
    """Barrier stages refuse it (SPARK-24942). Here none is there when fit is called, and none is held after it."""

    def held() -> int:
        return int(none_at_first.sparkContext._jsc.sc().getExecutorIds().size())

    assert held() == 0
    rows = [([float(i % 7), 1.0], i % 2) for i in range(400)]
    frame = none_at_first.createDataFrame(rows, "x array<float>, label int")
    cluster = tw.Spark(workers=2)
    result = tw.fit(lambda: nn.Linear(2, 2), frame, inputs=["x"], cluster=cluster, epochs=3, progress=False)
    assert result.summary["workers"] == 2
    assert result.summary["rows"] == 1200
    deadline = time.monotonic() + LONGEST_S
    while held():
        assert time.monotonic() < deadline, "executors are held after the run"
        time.sleep(0.5)
