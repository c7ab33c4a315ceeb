"""`thinwire bench ingest` and `thinwire bench predict`: writing a DataFrame to shards, and applying a model to one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from thinwire.cluster.frames import arrow_schema
from thinwire.cluster.sessions import start_session
from thinwire.data.feeds import Streamed, Wanted
from thinwire_lab.bench.report import Report, Row, Say

WIDTH = 256
WORKERS = 2
INGEST_TARGET, MEMORY_TARGET_MB, PREDICT_TARGET = 1.5, 400.0, 20.0


def ingest(quick: bool, say: Say) -> Report:
    """Time from a DataFrame of float arrays to complete shards, relative to an identity `mapInArrow`; memory."""
    sizes = (8, 32) if quick else (256, 1024)
    turns = 1 if quick else 3
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        session = start_session(None, WORKERS)
        try:
            for size_mb in sizes:
                path = os.path.join(folder, f"{size_mb}")
                say(f"writing {size_mb} MB of float arrays")
                _write(path, size_mb)
                frame = session.read.parquet(path).coalesce(WORKERS)
                plain, ours, memory = _ingested(session, frame, turns, say)
                ratios = tuple(a / b for a, b in zip(ours, plain, strict=True))
                detail = f"{statistics.median(ours):.1f} s, identity {statistics.median(plain):.1f} s"
                target = INGEST_TARGET if size_mb == sizes[-1] else None
                name = f"{size_mb} MB"
                rows.append(Row("ingest ÷ identity", name, statistics.median(ratios), target, detail, ratios, True))
                peak = max(memory)
                rows.append(Row("worker memory", name, peak, MEMORY_TARGET_MB, "", tuple(memory), True, "MB"))
                measured[name] = {"identity_s": plain, "ingest_s": ours, "memory_mb": memory}
        finally:
            session.stop()
    return Report("ingest", rows, measured)


def _ingested(session: Any, frame: Any, turns: int, say: Say) -> tuple[list[float], list[float], list[float]]:
    feed = Streamed(arrow_schema(frame), Wanted(("x", "label"), 0.0, None, 0))
    plain: list[float] = []
    ours: list[float] = []
    memory: list[float] = []
    _seconds(lambda: frame.limit(1000).mapInArrow(_identity, frame.schema).write.format("noop").mode("append").save())
    for turn in range(turns):
        say(f"identity and ingest in turn, {turn + 1} of {turns}")
        plain.append(
            _seconds(lambda: frame.mapInArrow(_identity, frame.schema).write.format("noop").mode("append").save())
        )
        began = time.perf_counter()
        found = frame.mapInArrow(_ingest_task(feed), "rows bigint, mb double").collect()
        ours.append(time.perf_counter() - began)
        memory += [float(row["mb"]) for row in found]
    return plain, ours, memory


def _identity(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def _ingest_task(feed: Streamed) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from thinwire.data import Shard

        peak = before = _anonymous_mb()

        def watched() -> Iterator[Any]:
            nonlocal peak
            for batch in batches:
                yield batch
                peak = max(peak, _anonymous_mb())

        with feed.shard(0, watched(), lambda name: iter(())) as files:
            shard = Shard.open(files.train)
        yield pa.RecordBatch.from_pydict({"rows": [shard.num_rows], "mb": [peak - before]})

    return task


def _anonymous_mb() -> float:
    """Private memory of this process, without mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))


def predict(quick: bool, say: Say) -> Report:
    """Rows per second of `transform`, relative to one row per forward pass."""
    from thinwire.models import mlp
    from thinwire.run.session import Result
    from thinwire.spark import TorchModel

    count, single, turns = (20_000, 2_000, 1) if quick else (200_000, 10_000, 3)
    session = start_session(None, WORKERS)
    try:
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
            _write(folder + "/rows", count * 64 * 4 / 1e6, width=64)
            frame = session.read.parquet(folder + "/rows").coalesce(WORKERS)
            model = TorchModel._of(Result(mlp().eval(), [], {}), mlp, None)
            model.setParams(input_cols=["x"], task="classification")
            many: list[float] = []
            one: list[float] = []
            for turn in range(turns + 1):
                say(f"transform, then one row at a time, {turn} of {turns}")
                seconds = _seconds(lambda: _consume(model.transform(frame)))
                model.setParams(predict_batch_size=1)
                few = _seconds(lambda: _consume(model.transform(frame.limit(single).repartition(WORKERS))))
                model.setParams(predict_batch_size=1024)
                if turn:  # the first turn starts Python and loads torch
                    many.append(frame.count() / seconds)
                    one.append(single / few)
    finally:
        session.stop()
    ratios = tuple(a / b for a, b in zip(many, one, strict=True))
    detail = f"{statistics.median(many):,.0f} / {statistics.median(one):,.0f} rows/s"
    row = Row("transform ÷ row by row", "mlp", statistics.median(ratios), PREDICT_TARGET, detail, ratios)
    return Report("predict", [row], {"rows_per_s": many, "one_by_one_rows_per_s": one})


def _consume(frame: Any) -> None:
    frame.select("rawPrediction", "probability", "prediction").write.format("noop").mode("append").save()


def _seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _write(path: str, size_mb: float, width: int = WIDTH) -> None:
    """Writes Parquet files of float arrays with a total of `size_mb` megabytes, two for each worker."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.makedirs(path, exist_ok=True)
    rows = int(size_mb * 1e6 / (width * 4) / (2 * WORKERS))
    for number in range(2 * WORKERS):
        values = np.random.default_rng(number).random(rows * width, dtype=np.float32)
        offsets = np.arange(rows + 1, dtype=np.int32) * width
        x = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        table = pa.table({"x": x, "label": pa.array(np.arange(rows) % 10)})
        pq.write_table(table, os.path.join(path, f"{number}.parquet"), compression="none", use_dictionary=False)
