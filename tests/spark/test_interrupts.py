"""Ctrl-C, a cancelled job, a driver that dies: no orphan, no held slot, a checkpoint where one can be left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.errors import Interrupted, LostWorkersError

from .conftest import LONGEST_S, PATIENT, Slow

pytestmark = pytest.mark.timeout(1200)


class Then:
    """Does something once the run is under way."""

    def __init__(self, act: Any) -> None:
        self.act, self.done = act, False
        self.pids: dict[int, int] = {}

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerJoined):
            self.pids[event.worker] = event.pid
        if isinstance(event, events.Progressed) and event.steps >= 40 and not self.done:
            self.done = True
            self.act()


def fit(frame: Any, then: Then, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {"inputs": ["pixels"], "epochs": 60, "batch_size": 16, "progress": False}
    settings |= {"deadlines": PATIENT}
    settings |= {"strategy": tw.SparkNet(period=10), "cluster": tw.Spark(workers=3, preflight=False)}
    return tw.fit(Slow, frame.select("pixels", "label"), callbacks=[then], **(settings | changes))


def assert_slots_are_free(spark: Any, folder: Path) -> None:
    """Three tasks that wait for each other: they only meet where three slots are free."""
    place = str(folder)

    def meet(batches: Any) -> Any:
        import os
        import time

        for batch in batches:
            open(os.path.join(place, f"task-{batch.column(0)[0]}"), "w").close()
            deadline = time.monotonic() + 600
            while len([n for n in os.listdir(place) if n.startswith("task-")]) < 3:
                assert time.monotonic() < deadline, "the others have no slot"
                time.sleep(0.1)
            yield batch

    assert spark.range(0, 3, 1, 3).mapInArrow(meet, "id bigint").count() == 3


def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on_with_another_number_of_workers(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    then = Then(lambda: threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start())
    out = str(tmp_path / "run")
    with pytest.raises(Interrupted, match="resume"):
        fit(digits, then, out=out)
    manifest = CheckpointStore(f"{out}/checkpoints").latest()
    assert manifest is not None
    assert manifest.step >= 40
    assert_slots_are_free(spark, tmp_path)
    again = fit(digits, Then(lambda: None), resume=out, epochs=2, cluster=tw.Spark(workers=2, preflight=False))
    assert again.summary["workers"] == 2
    assert again.summary["steps"] >= manifest.step


def test_a_cancelled_job_group_ends_the_fit_with_what_spark_says(spark: Any, digits: Any, tmp_path: Path) -> None:
    """The group is the caller's, as a notebook's or a scheduler's is."""
    then = Then(lambda: spark.sparkContext.cancelJobGroup("mine"))
    spark.sparkContext.setJobGroup("mine", "of the test")
    try:
        with pytest.raises(LostWorkersError, match="cancel"):
            fit(digits, then)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    deadline = time.monotonic() + LONGEST_S
    while any(os.path.exists(f"/proc/{pid}") and _trains(pid) for pid in then.pids.values()):
        assert time.monotonic() < deadline, "a worker outlived its run"
        time.sleep(0.5)
    assert_slots_are_free(spark, tmp_path)


def _trains(pid: int) -> bool:
    """Whether a Python worker still burns time; Spark keeps idle ones for the next task."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    try:
        before = ticks()
        time.sleep(1.0)
        return ticks() - before > 5
    except OSError:
        return False
