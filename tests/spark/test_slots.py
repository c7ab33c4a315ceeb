"""Fewer free slots than workers: training starts with those who are there and grows as slots appear."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from thinwire import events

from .conftest import Slow

pytestmark = pytest.mark.timeout(180)


def test_three_are_asked_two_slots_are_free_and_the_third_joins_later(spark: Any, digits: Any) -> None:
    free = threading.Event()

    def occupy() -> None:
        def hold(batches: Any) -> Any:
            import time

            time.sleep(30)
            yield from batches

        spark.range(0, 1, 1, 1).mapInArrow(hold, "id bigint").collect()
        free.set()

    threading.Thread(target=occupy, daemon=True).start()
    time.sleep(3)
    log: list[events.Event] = []
    result = tw.fit(
        Slow,
        digits.select("pixels", "label"),
        inputs=["pixels"],
        strategy=tw.SparkNet(period=10),
        cluster=tw.Spark(workers=3, preflight=False),
        epochs=30,
        batch_size=16,
        callbacks=[log.append],
        progress=False,
    )
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    assert len(formed[0]) == 2, formed
    assert formed[-1] == (0, 1, 2)
    assert result.summary["rows"] == 30 * 1797
    assert result.summary["workers_lost"] == 0
    assert free.wait(60)


def test_a_worker_that_is_done_makes_room_for_one_that_found_no_slot(spark: Any, digits: Any, tmp_path: Path) -> None:
    over = tmp_path / "over"

    def hold(batches: Any) -> Any:
        import os
        import time

        deadline = time.monotonic() + 150
        while not os.path.exists(held) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield from batches

    held = str(over)
    frame = spark.range(0, 1, 1, 1).mapInArrow(hold, "id bigint")
    holder = threading.Thread(target=frame.collect, daemon=True)
    holder.start()
    time.sleep(3)
    log: list[events.Event] = []
    try:
        result = tw.fit(
            lambda: nn.Linear(64, 10),
            digits.select("pixels", "label"),
            inputs=["pixels"],
            cluster=tw.Spark(workers=3, preflight=False),
            epochs=10,
            batch_size=16,
            deadlines=tw.Deadlines(gather_s=4.0),
            callbacks=[log.append],
            progress=False,
        )
    finally:
        over.touch()
        holder.join(60)
    assert not holder.is_alive()
    formed = [e.members for e in log if isinstance(e, events.GenerationFormed)]
    assert formed[0] == (0, 1), formed
    assert 2 in formed[-1], formed
    assert all(len(members) <= 2 for members in formed), "there never was a third slot"
    assert result.summary["rows"] == 10 * 1797
    assert result.summary["complete"]
    assert result.summary["workers_lost"] == 0
