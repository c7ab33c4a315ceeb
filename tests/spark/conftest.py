"""Spark clusters on this machine, one at a time, shared by the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import shutil
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

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thinwire[spark]'")

THREE, PAIRS = "local-cluster[3,1,1024]", "local-cluster[2,2,1024]"
"""Executors with one slot each; and executors with a second slot, for tasks that visit their workers."""
KILLING = ("test_dashboard.py", "test_executors_die.py", "test_groups_on_spark.py", "test_interrupts.py")
PATIENT = tw.Deadlines(silence_s=60.0, prepare_s=300.0, gather_s=600.0, start_s=600.0, rejoin_s=600.0, stall_s=300.0)
"""Deadlines for runs without losses whose workers are all present from the start, on machines of any speed."""
LONGEST_S = 600.0
"""Longest time that a test waits for anything; prevents hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests by cluster: those that kill executors run last on their cluster, then tests of other clusters."""

    def turn(item: pytest.Item) -> int:
        if item.path.parent != Path(__file__).parent:
            return 0
        if {"pairs", "none_at_first"} & set(getattr(item, "fixturenames", ())):
            return 3
        return 2 if item.path.name in KILLING else 1

    items.sort(key=turn)


class Clusters:
    """The Spark session of this process, of which only one can exist at a time."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.master, self.current, self.frame = "", None, None
        self.applications: list[Path] = []

    def of(self, master: str, **settings: str) -> Any:
        """The session of a cluster; starts the cluster unless it is running."""
        if self.master != master:
            self.stop()
            self.current, self.master = self._start(master, settings), master
            self.applications.append(Path(spark_home(), "work", self.current.sparkContext.applicationId))
        return self.current

    def _start(self, master: str, more: dict[str, str]) -> Any:
        """Starts the driver's JVM in the scratch folder, because Spark resolves relative paths against it."""
        from pyspark.sql import SparkSession

        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "spark.task.maxFailures": "100",
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.stage.maxConsecutiveAttempts": "20",
            "spark.local.dir": str(self.scratch),
            "spark.sql.warehouse.dir": str(self.scratch / "warehouse"),
            "spark.sql.shuffle.partitions": "4",
        }
        builder = SparkSession.builder.master(master).appName("thinwire tests")
        for name, value in (settings | more).items():
            builder = builder.config(name, value)
        here = os.getcwd()
        os.chdir(self.scratch)
        try:
            session = builder.getOrCreate()
        finally:
            os.chdir(here)
        session.sparkContext.setLogLevel("OFF")
        return session

    def wait(self) -> None:
        """Waits until all executors are present and idle: an earlier test may have killed some, or left some busy."""
        if self.current is None:
            return
        wanted = int(self.master.partition("[")[2].split(",")[0])
        tracker = self.current.sparkContext._jsc.sc().statusTracker()
        deadline = time.monotonic() + LONGEST_S
        while True:
            busy = [executor.numRunningTasks() for executor in tracker.getExecutorInfos()]  # includes the driver
            if len(busy) == wanted + 1 and not any(busy):
                return
            assert time.monotonic() < deadline, f"{wanted} idle executors never came: {busy} with the driver"
            time.sleep(0.1)

    def digits(self) -> Any:
        """The digits as a DataFrame: `pixels` array<float> of 64, `label` int, `number` bigint."""
        from thinwire.data import open_source

        if self.frame is None:
            table = next(iter(open_source("digits").batches()))
            pixels, labels = table.column("pixels").storage.to_pylist(), table.column("label").to_pylist()
            rows = [(p, label, i) for i, (p, label) in enumerate(zip(pixels, labels, strict=True))]
            assert self.current is not None
            self.frame = self.current.createDataFrame(rows, "pixels array<float>, label int, number bigint").cache()
        return self.frame

    def stop(self) -> None:
        if self.current is not None:
            self.current.stop()
        self.master, self.current, self.frame = "", None, None

    def told(self) -> str:
        """What the executors of the cluster have written to their standard error."""
        return "".join(path.read_text(errors="replace") for path in self.applications[-1].glob("*/stderr"))


def spark_home() -> str:
    """The installation folder of Spark, below which executors on this machine have their folders."""
    from pyspark.find_spark_home import _find_spark_home

    return str(_find_spark_home())


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    if shutil.which("java") is None:
        pytest.skip("there is no Java here, which Spark needs")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    found = Clusters(tmp_path_factory.mktemp("spark"))
    yield found
    found.stop()
    for folder in found.applications:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def spark(clusters: Clusters) -> Any:
    """Three executors with one slot each: a master, three workers and three JVMs, as processes."""
    return clusters.of(THREE)


@pytest.fixture(scope="module")
def pairs(clusters: Clusters) -> Any:
    """Two executors with two slots each."""
    return clusters.of(PAIRS)


@pytest.fixture(scope="module")
def digits(clusters: Clusters, spark: Any) -> Any:
    """See `Clusters.digits`."""
    return clusters.digits()


@pytest.fixture
def unstopped(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cluster, for programs that start and stop a session: they get this session, which keeps running."""
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "stop", lambda session: None)
    return spark


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Makes every test begin with all executors present and idle."""
    if {"spark", "pairs"} & set(request.fixturenames):
        request.getfixturevalue("clusters").wait()


class Slow(nn.Module):
    """A network whose steps take 20 ms, which leaves time for faults during a run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return self.layer(x)


@contextlib.contextmanager
def slots_taken(spark: Any, folder: Path, count: int) -> Iterator[Path]:
    """Tasks occupy `count` slots until the yielded file exists."""
    over = folder / "over"
    place, until = str(folder), str(over)

    def hold(batches: Any) -> Any:
        import os
        import time

        for batch in batches:
            open(os.path.join(place, f"here-{batch.column(0)[0]}"), "w").close()
            while not os.path.exists(until):
                time.sleep(0.2)
            yield batch

    frame = spark.range(0, count, 1, count).mapInArrow(hold, "id bigint")
    holder = threading.Thread(target=frame.collect, daemon=True)
    holder.start()
    try:
        deadline = time.monotonic() + LONGEST_S
        while len(list(folder.glob("here-*"))) < count:
            assert time.monotonic() < deadline, "the tasks found no slots"
            time.sleep(0.1)
        yield over
    finally:
        over.touch()
        holder.join(LONGEST_S)
    assert not holder.is_alive()


@contextlib.contextmanager
def one_executor_filled(spark: Any, folder: Path) -> Iterator[Path]:
    """Tasks occupy all slots of one executor, and none of the other's, until the yielded file exists."""
    context = spark.sparkContext
    count = context.defaultParallelism
    place = str(folder)

    def hold(batches: Any) -> Any:
        import time
        from pathlib import Path

        from thinwire.exchange.spark.link import _executor

        for batch in batches:
            here = Path(place, f"here-{_executor()}-{batch.column(0)[0]}")
            here.touch()
            while not (Path(place, "over").exists() or Path(place, f"free-{_executor()}").exists()):
                time.sleep(0.2)
            yield batch

    over = folder / "over"
    holder = threading.Thread(target=spark.range(0, count, 1, count).mapInArrow(hold, "id bigint").collect, daemon=True)
    holder.start()

    def until(met: Any, what: str) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not met():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def busy() -> list[int]:
        found = context._jsc.sc().taskScheduler().runningTasksByExecutors()
        return sorted(int(found.get(e).get()) for e in _names(context) if found.get(e).isDefined())

    try:
        until(lambda: len(list(folder.glob("here-*"))) == count, "the tasks found no slots")
        executor = next(folder.glob("here-*")).name.split("-")[1]
        (folder / f"free-{executor}").touch()
        until(lambda: busy() == [0, count // 2], "the tasks of one executor did not end")
        yield over
    finally:
        over.touch()
        holder.join(LONGEST_S)
    assert not holder.is_alive()


def _names(context: Any) -> list[str]:
    """Spark's names of the executors."""
    found = context._jsc.sc().statusStore().executorList(True)
    return [found.apply(i).id() for i in range(found.size()) if found.apply(i).id() != "driver"]


def executor_of(pid: int) -> int:
    """The executor JVM of a Python worker: the parent of its daemon."""
    for _ in range(4):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no executor above this process")
