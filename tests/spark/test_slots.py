"""Fewer free slots than workers: training starts with those who are there and grows as slots appear."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

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
