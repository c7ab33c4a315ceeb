"""What users of other trainers on Spark complain of; each test is named after it, its docstring says where."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.errors import ConfigError, TimedOutError, WorkerError
from thinwire.models import mlp
from thinwire.spark import TorchEstimator

from .conftest import PATIENT, Slow, slots_taken

pytestmark = pytest.mark.timeout(900)


def fit(frame: Any, model: Any = mlp, **changes: Any) -> tw.Result:
    settings: dict[str, Any] = {"inputs": ["pixels"], "strategy": tw.SparkNet(period=5), "progress": False}
    settings |= {"cluster": tw.Spark(workers=3, preflight=False), "epochs": 4, "batch_size": 16}
    settings |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "deadlines": PATIENT}
    return tw.fit(model, frame, **(settings | changes))


def test_hang_one_workers_error_leaves_the_others_waiting(digits: Any) -> None:
    """horovod/horovod#3165, yahoo/TensorFlowOnSpark#480, deeplearning4j/deeplearning4j#6677."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from pyspark import TaskContext

            context = TaskContext.get()
            if context is not None and context.partitionId() == 1 and self.training:
                raise ArithmeticError("only here")
            return self.layer(x)

    with pytest.raises(WorkerError, match=r"worker 1 on (?s:.)*only here"):
        fit(digits, Fragile)


@pytest.mark.long
def test_hang_a_worker_that_stands_still_holds_up_the_run_for_good(digits: Any) -> None:
    """dmlc/xgboost#10795, ray-project/raydp#348: a process that neither works nor ends is given up after a while."""
    stopped: list[int] = []
    log: list[events.Event] = []

    def stop(event: events.Event) -> None:
        log.append(event)
        if isinstance(event, events.Progressed) and event.worker == 2 and event.steps >= 10 and not stopped:
            stopped.append(next(e.pid for e in log if isinstance(e, events.WorkerJoined) and e.worker == 2))
            os.kill(stopped[0], signal.SIGSTOP)

    deadlines = tw.Deadlines(silence_s=10.0, rejoin_s=5.0)
    try:
        result = fit(digits, Slow, deadlines=deadlines, callbacks=[stop])
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    assert result.summary["workers_lost"] == 1
    assert not result.summary["complete"], "worker 2's rows were not done, and the result says so"
    assert "[2]" in result.summary["reason"]


def test_hang_no_executor_ever_comes(spark: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """yahoo/TensorFlowOnSpark#288: a cluster without a free slot is an error that says so."""
    monkeypatch.setattr("thinwire.cluster.frames.ROW_S", 2.0)
    with slots_taken(spark, tmp_path, 3), pytest.raises(TimedOutError, match="no worker joined within 2 s"):
        fit(digits, cluster=tw.Spark(workers=1, preflight=False), deadlines=tw.Deadlines(start_s=2.0))


def test_package_absent_on_executors(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """dmmiller612/sparktorch#35, horovod/horovod#883: named before the run, with what to do."""
    from thinwire.cluster import preflight

    monkeypatch.setattr(preflight, "PACKAGES", (*preflight.PACKAGES, "no-such-package"))
    with pytest.raises(ConfigError, match=r"lack no-such-package (?s:.)*PYSPARK_PYTHON"):
        preflight.examine(spark, 2, "127.0.0.1").refuse()


class Written(nn.Module):
    """Appends the row numbers it is trained on to a file of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.layer = folder, nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with open(os.path.join(self.folder, str(os.getpid())), "a") as file:
                file.writelines(f"{int(v)}\n" for v in x)
        return self.layer(x.float().unsqueeze(1) / 1e4)


@pytest.mark.parametrize("batch_size", [7, pytest.param(1000, marks=pytest.mark.long)])
def test_rows_are_duplicated_or_dropped_and_the_batch_must_divide(spark: Any, tmp_path: Path, batch_size: int) -> None:
    """horovod/horovod#2896, NVIDIA-Merlin/models#765, intel/ipex-llm#2728: 101 rows, three workers, any batch size."""
    frame = spark.range(101).selectExpr("id as x", "cast(id % 2 as int) as label").repartition(7)
    folder = str(tmp_path)
    fit(frame, lambda: Written(folder), inputs=["x"], epochs=3, batch_size=batch_size)
    workers = [path for path in tmp_path.iterdir() if path.name != str(os.getpid())]  # the driver tries one row
    seen = Counter(int(line) for path in workers for line in path.read_text().split())
    assert seen == Counter(dict.fromkeys(range(101), 3))


def test_empty_validation(digits: Any) -> None:
    """dmlc/xgboost#8231: partitions without validation rows, and none at all.

    One executor more than workers: a test before this may have killed one, and a worker that is done leaves its slot to
    one that has none, its validation rows with it.
    """
    from pyspark.sql import functions as sql

    some = digits.withColumn("held", sql.col("number") == 5)
    estimator = TorchEstimator(
        model=mlp,
        input_cols=["pixels"],
        label_col="label",
        validation_indicator_col="held",
        num_workers=2,
        progress=False,
    )
    assert estimator.fit(some).summary["val_accuracy"] in (0.0, 1.0)
    none = digits.withColumn("held", sql.lit(False))
    assert estimator.fit(none).summary["val_accuracy"] is None


@pytest.mark.long
def test_accuracy_falls_with_workers(digits: Any) -> None:
    """maxpumperla/elephas#135, #126 (10 % on MNIST): three workers come as far as one."""
    one, three = (
        fit(
            digits,
            strategy=tw.SparkNet(period=10),
            cluster=tw.Spark(workers=k, preflight=False),
            epochs=15,
            validation=0.2,
        ).summary["val_accuracy"]
        for k in (1, 3)
    )
    assert one >= 0.9
    assert three >= one - 0.02


def test_prediction_collects_the_data_on_the_driver(spark: Any, digits: Any) -> None:
    """maxpumperla/elephas#172, deeplearning4j/deeplearning4j#688: transform runs nothing and brings nothing here."""
    model = TorchEstimator(mlp, input_cols=["pixels"], label_col="label", num_workers=2, epochs=1).fit(digits)
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("transforming", "nothing is to run in it")
    found = model.transform(digits)
    assert not tracker.getJobIdsForGroup("transforming")
    spark.sparkContext.setJobGroup("", "")
    assert found.filter("prediction = label").count() > 0


def test_checkpoints_on_a_folder_of_the_driver_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors that do not see the run's folder would each keep a part of a checkpoint: refused, with a way out."""
    import contextlib

    from thinwire.cluster import preflight

    @contextlib.contextmanager
    def elsewhere(out: str | None) -> Any:
        yield os.path.join(str(tmp_path), "not-there")

    assert not preflight.examine(spark, 2, "127.0.0.1", str(tmp_path)).problems
    assert list(tmp_path.iterdir()) == [], "the mark is taken away again"
    monkeypatch.setattr(preflight, "_marked", elsewhere)
    with pytest.raises(ConfigError, match=r"cannot see out=(?s:.)*hdfs://"):
        preflight.examine(spark, 2, "127.0.0.1", str(tmp_path)).refuse()


def test_cannot_resume_from_where_it_was(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ray-project/ray#46814 (restarts at epoch 1), horovod/horovod#2953; the folder's name is relative."""
    monkeypatch.chdir(tmp_path)
    first = fit(digits, out="run", epochs=1)
    again = fit(digits, resume="run", epochs=2)
    assert again.summary["rows"] == 2 * first.summary["rows"]
    assert again.summary["steps"] == 2 * first.summary["steps"]


@pytest.mark.long
def test_a_shard_larger_than_a_workers_memory(spark: Any) -> None:
    """yahoo/CaffeOnSpark#234, intel/BigDL#695: rows lie in a mapped file; the process may not hold what they take."""
    rows, width, limit = 6_000, 16_384, 250 << 20  # 393 MB in one shard

    def wide(batches: Any) -> Any:
        import numpy as np
        import pyarrow as pa

        for batch in batches:
            for start in range(0, batch.num_rows, 100):
                count = min(100, batch.num_rows - start)
                flat = pa.array(np.ones(count * width, np.float32))
                lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width), flat)
                yield pa.RecordBatch.from_arrays([lists, pa.array([0, 1] * (count // 2), pa.int32())], ["x", "label"])

    class Narrow(nn.Module):
        """Refuses to go on when the process has come to hold more of its own than the limit."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.start = nn.Linear(width, 2), _own_memory()  # the rows are read after this

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = _own_memory()
            assert own - self.start < limit, f"{(own - self.start) >> 20} MB more than before the rows were read"
            return self.layer(x)

    frame = spark.range(0, rows, 1, 1).mapInArrow(wide, "x array<float>, label int")
    cluster = tw.Spark(workers=1, preflight=False, repartition=False)
    result = tw.fit(Narrow, frame, inputs=["x"], cluster=cluster, epochs=1, batch_size=64, progress=False)
    assert result.summary["rows"] == rows


def _own_memory() -> int:
    """What this process holds beside mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def test_loss_cannot_be_logged(digits: Any) -> None:
    """horovod/horovod#2492: a callback hears of every epoch and evaluation while the run goes on."""
    log: list[events.Event] = []
    fit(digits, validation=0.2, epochs=2, callbacks=[log.append])
    losses = [e.loss for e in log if isinstance(e, events.EpochEnded)]
    assert len(losses) == 6
    assert all(np.isfinite(v) for v in losses if v is not None)
    assert any(isinstance(e, events.Evaluated) and "val_loss" in e.metrics for e in log)
