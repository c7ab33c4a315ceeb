"""Fewer free slots than workers: training starts with those who are there and grows as slots appear."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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


def test_executors_come_by_dynamic_allocation(tmp_path: Path) -> None:
    """Barrier stages refuse it (SPARK-24942). Here none is there when fit is called, and none is held after it."""
    script = """
import time
from pyspark.sql import SparkSession
import thinwire as tw
settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true", "spark.dynamicAllocation.initialExecutors": "0",
            "spark.dynamicAllocation.minExecutors": "0", "spark.dynamicAllocation.maxExecutors": "2",
            "spark.dynamicAllocation.executorIdleTimeout": "2s",
            "spark.dynamicAllocation.cachedExecutorIdleTimeout": "4s",
            "spark.dynamicAllocation.shuffleTracking.timeout": "4s"}
builder = SparkSession.builder.master("local-cluster[2,1,1024]")
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
held = lambda: spark.sparkContext._jsc.sc().getExecutorIds().size()
before = held()
rows = [([float(i % 7), 1.0], i % 2) for i in range(400)]
frame = spark.createDataFrame(rows, "x array<float>, label int")
from torch import nn
result = tw.fit(lambda: nn.Linear(2, 2), frame, inputs=["x"], cluster=tw.Spark(workers=2), epochs=3, progress=False)
deadline = time.monotonic() + 60
while held() and time.monotonic() < deadline:
    time.sleep(0.5)
print("said:", before, result.summary["workers"], result.summary["rows"], held())
spark.stop()
"""
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    argv = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, env=environment, cwd=tmp_path)
    assert "said: 0 2 1200 0" in done.stdout, done.stdout + done.stderr[-3000:]
