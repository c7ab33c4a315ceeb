"""A real Spark cluster of three executors on this machine, one for all tests of this folder; and who to kill in it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`local-cluster[3,1,1024]`: a master, three workers and three executor JVMs, as processes."""
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    scratch = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local-cluster[3,1,1024]")
        .appName("thinwire tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        .config("spark.task.maxFailures", "100")
        .config("spark.deploy.maxExecutorRetries", "-1")
        .config("spark.stage.maxConsecutiveAttempts", "20")
        .config("spark.local.dir", str(scratch))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def digits(spark: Any) -> Any:
    """The digits as a DataFrame: `pixels` array<float> of 64, `label` int, `number` bigint."""
    from thinwire.data import open_source

    table = next(iter(open_source("digits").batches()))
    pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
    rows = [(p, label, i) for i, (p, label) in enumerate(zip(pixels, labels, strict=True))]
    return spark.createDataFrame(rows, "pixels array<float>, label int, number bigint").cache()


class Slow(nn.Module):
    """A network whose steps take 20 ms, as one of some size would: there is time to do something to the run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return self.layer(x)


def executor_of(pid: int) -> int:
    """The executor JVM above a Python worker: its daemon's parent."""
    for _ in range(4):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no executor above this process")
