"""A Spark cluster on an emulated network: a node's link is cut for 20 s and healed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thinwire.testing.sparkbed import SparkBed

why_not = SparkBed.why_not()
pytestmark = [pytest.mark.skipif(why_not is not None, reason=str(why_not)), pytest.mark.timeout(400)]
NODES = 3

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
        return x

spark = start_session(os.environ["THINWIRE_MASTER"], 3)
table = next(iter(open_source("digits").batches()))
pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
frame = spark.createDataFrame(list(zip(pixels, labels)), "pixels array<float>, label int")
tw.fit(
    lambda: nn.Sequential(Paced(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), frame, inputs=["pixels"],
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), strategy=tw.Relay(), validation=0.2,
    cluster=tw.Spark(workers=int(sys.argv[3])), epochs=40, batch_size=16, out=sys.argv[1], progress=False,
)
spark.stop()
"""


def events(out: Path) -> list[dict[str, Any]]:
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(what: Any, driver: subprocess.Popen[Any], log: Path, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert driver.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)
    return found


def test_a_node_whose_link_is_cut_for_20_s_rejoins_and_the_run_finishes(tmp_path: Path) -> None:
    out, fast, log = tmp_path / "run", tmp_path / "fast", tmp_path / "log"
    (tmp_path / "driver.py").write_text(DRIVER)
    with SparkBed(NODES, "1gbit") as cluster, log.open("w") as said:
        argv = [sys.executable, str(tmp_path / "driver.py"), str(out), str(fast), str(NODES)]
        driver = cluster.drive(argv, stdout=said, stderr=subprocess.STDOUT)

        def under_way() -> bool:
            return sum(e["kind"] == "progressed" and e["steps"] >= 20 for e in events(out)) >= NODES

        wait_for(under_way, driver, log)
        cluster.bed.cut(2)
        time.sleep(20)
        cluster.bed.heal(2)
        wait_for(lambda: [e for e in events(out) if e["kind"] == "rejoined"], driver, log)
        fast.touch()
        assert driver.wait(180) == 0, log.read_text()[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["workers_lost"] >= 1
    assert summary["complete"]
    assert max(e["metrics"]["val_accuracy"] for e in events(out) if e["kind"] == "evaluated") >= 0.9
    lost = {e["worker"] for e in events(out) if e["kind"] == "worker_lost"}
    gaps = [e["gap_s"] for e in events(out) if e["kind"] == "progressed" and e["worker"] not in lost]
    assert max(gaps) <= 2.0
