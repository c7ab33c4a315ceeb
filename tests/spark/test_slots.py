"""Fewer free slots than workers: training starts with those who are there and grows as slots appear."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events

from .conftest import Slow

pytestmark = pytest.mark.timeout(180)


class Waits(Slow):
    """Steps slowly until a file is there."""

    def __init__(self, signal: str) -> None:
        super().__init__()
        self.signal = signal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not os.path.exists(self.signal):
            time.sleep(0.1)
        return self.layer(x)


@contextlib.contextmanager
def one_slot_taken(spark: Any, folder: Path) -> Iterator[Path]:
    """A task holds one of the three slots until the file is there."""
    here, over = folder / "here", folder / "over"
    began, until = str(here), str(over)

    def hold(batches: Any) -> Any:
        import os
        import time

        open(began, "w").close()
        deadline = time.monotonic() + 150
        while not os.path.exists(until) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield from batches

    holder = threading.Thread(target=spark.range(0, 1, 1, 1).mapInArrow(hold, "id bigint").collect, daemon=True)
    holder.start()
    try:
        deadline = time.monotonic() + 60
        while not here.exists():
            assert time.monotonic() < deadline, "the task found no slot"
            time.sleep(0.1)
        yield over
    finally:
        over.touch()
        holder.join(60)
    assert not holder.is_alive()


def test_three_are_asked_two_slots_are_free_and_the_third_joins_later(spark: Any, digits: Any, tmp_path: Path) -> None:
    log: list[events.Event] = []
    fast = tmp_path / "fast"
    with one_slot_taken(spark, tmp_path) as over:

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
            deadlines=tw.Deadlines(gather_s=12.0),
            callbacks=[watch],
            progress=False,
        )
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    assert len(formed[0]) == 2, formed
    assert formed[-1] == (0, 1, 2)
    assert result.summary["rows"] == 15 * 1797
    assert result.summary["workers_lost"] == 0


def test_a_worker_that_is_done_makes_room_for_one_that_found_no_slot(spark: Any, digits: Any, tmp_path: Path) -> None:
    log: list[events.Event] = []
    with one_slot_taken(spark, tmp_path):
        result = tw.fit(
            lambda: nn.Linear(64, 10),
            digits.select("pixels", "label"),
            inputs=["pixels"],
            cluster=tw.Spark(workers=3, preflight=False),
            epochs=10,
            batch_size=16,
            deadlines=tw.Deadlines(gather_s=12.0),
            callbacks=[log.append],
            progress=False,
        )
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    (late,) = {0, 1, 2} - set(formed[0])
    assert late in formed[-1], formed
    assert all(len(members) <= 2 for members in formed), "there never was a third slot"
    assert result.summary["rows"] == 10 * 1797
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == 0
