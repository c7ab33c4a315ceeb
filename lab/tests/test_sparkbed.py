"""A Spark cluster on an emulated network: a node's link is cut for 20 s and healed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire_lab.sparkbed import SparkBed

why_not = SparkBed.why_not()
pytestmark = [pytest.mark.skipif(why_not is not None, reason=str(why_not)), pytest.mark.timeout(1800)]
NODES, EPOCHS = 4, 60

DRIVER = """
import os, sys, time
import torch
from torch import nn
import thinwire as tw
from thinwire.cluster.sessions import start_session
from thinwire.data import open_source

FAST = sys.argv[2]


class Paced(nn.Module):
    def forward(self, x):
        if self.training and not os.path.exists(FAST):
            time.sleep(0.1)
            open(f"{FAST}.{os.getpid()}", "w").close()
        return x

spark = start_session(os.environ["THINWIRE_MASTER"], int(sys.argv[3]))
table = next(iter(open_source("digits").batches()))
pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
frame = spark.createDataFrame(list(zip(pixels, labels)), "pixels array<float>, label int")
tw.fit(
    lambda: nn.Sequential(Paced(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), frame, inputs=["pixels"],
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), strategy=tw.Relay(), validation=0.2,
    cluster=tw.Spark(workers=int(sys.argv[3])), epochs=int(sys.argv[4]), batch_size=16, out=sys.argv[1], progress=False,
)
spark.stop()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkBed]:
    with SparkBed(NODES, "1gbit") as bed:
        yield bed


def test_a_cluster_comes_up_on_nodes_of_its_own_and_is_gone_afterwards() -> None:
    with SparkBed(1, "1gbit") as bed:
        namespace = bed.bed.namespace(1)
        assert bed._registered() == 1
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert namespace not in listed


class Drive:
    """A driver on node 0, and what it says and writes."""

    def __init__(self, cluster: SparkBed, folder: Path, starts_with: int | None = None) -> None:
        self.out, self.fast, self.log = folder / "run", folder / "fast", folder / "log"
        (folder / "driver.py").write_text(DRIVER)
        argv = [
            sys.executable,
            str(folder / "driver.py"),
            str(self.out),
            str(self.fast),
            str(cluster.nodes),
            str(EPOCHS),
        ]
        with self.log.open("w") as said:
            self.process = cluster.drive(argv, stdout=said, stderr=subprocess.STDOUT)
        self.wait_for(lambda: len(self.workers_at_step(20)) >= (starts_with or cluster.nodes))

    def workers_at_step(self, steps: int) -> set[int]:
        return {e["worker"] for e in self.events() if e["kind"] == "progressed" and e["steps"] >= steps}

    def events(self) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: Any, timeout_s: float = 900.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)
        return found


@pytest.mark.long
def test_a_node_whose_link_is_cut_for_20_s_rejoins_and_the_run_finishes(cluster: SparkBed, tmp_path: Path) -> None:
    drive = Drive(cluster, tmp_path)
    cluster.bed.cut(2)
    time.sleep(20)
    cluster.bed.heal(2)
    drive.wait_for(lambda: [e for e in drive.events() if e["kind"] == "rejoined"])
    drive.fast.touch()
    assert drive.process.wait(900) == 0, drive.log.read_text()[-4000:]
    summary = json.loads((drive.out / "summary.json").read_text())
    assert summary["workers_lost"] >= 1
    assert summary["complete"]
    log = drive.events()
    kinds = [e["kind"] for e in log]
    away = log[kinds.index("worker_lost") : kinds.index("rejoined")]
    lost = {e["worker"] for e in log if e["kind"] == "worker_lost"}
    for worker in set(range(NODES)) - lost:
        steps = [e["steps"] for e in away if e["kind"] == "progressed" and e["worker"] == worker]
        assert steps[-1] > steps[0], "a worker waited for the one that was cut off"


@pytest.mark.long
def test_four_are_asked_two_slots_are_free_and_the_run_grows_as_executors_arrive(
    cluster: SparkBed, tmp_path: Path
) -> None:
    removed = cluster._log(0).count("Removing worker")
    for node in (3, 4):
        cluster.bed.kill(node)
    deadline = time.monotonic() + 900
    while cluster._log(0).count("Removing worker") < removed + 2:
        assert time.monotonic() < deadline, "the master never heard of it"
        time.sleep(0.2)
    try:
        drive = Drive(cluster, tmp_path, starts_with=2)
        formed = [e["members"] for e in drive.events() if e["kind"] == "generation_formed"]
        assert [len(members) for members in formed] == [2]
    finally:
        for node in (3, 4):
            cluster.start_worker(node)

    def all_four() -> bool:
        return any(len(e["members"]) == NODES for e in drive.events() if e["kind"] == "generation_formed")

    drive.wait_for(all_four)
    drive.fast.touch()
    assert drive.process.wait(900) == 0, drive.log.read_text()[-4000:]
    summary = json.loads((drive.out / "summary.json").read_text())
    assert summary["complete"]
    assert summary["workers_lost"] == 0
    assert summary["rows"] == EPOCHS * (1797 - 360)


@pytest.mark.long
def test_workers_end_by_themselves_when_the_driver_dies(tmp_path: Path) -> None:
    with SparkBed(2, "1gbit") as cluster:  # its own: Spark's master is long in forgetting a driver that it cannot hear
        drive = Drive(cluster, tmp_path)
        steps = [Path(f"{drive.fast}.{e['pid']}") for e in drive.events() if e["kind"] == "worker_joined"]
        assert len(steps) == 2
        cluster.bed.cut(0)  # no word of the driver's end gets out: workers must find out by themselves
        drive.process.kill()
        deadline = time.monotonic() + 900
        while alive := [path.name for path in steps if time.time() - path.stat().st_mtime < 5]:
            assert time.monotonic() < deadline, f"{alive} outlived their driver"
            time.sleep(1.0)
