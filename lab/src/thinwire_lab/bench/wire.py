"""`thinwire bench wire`: an exchange of a whole vector over each wire, against a PySpark program written by hand."""

from __future__ import annotations

import functools
import json
import secrets
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from thinwire.checkpoint import decode, encode
from thinwire.cluster.sessions import start_session
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity, Peer, TreeCodec
from thinwire.exchange.signals import Formed, Landed
from thinwire.exchange.spark.link import SparkWire
from thinwire.exchange.spark.post import SparkHub
from thinwire.exchange.spark.rounds import THROUGH_SPARK
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import Bye
from thinwire.strategies import SparkNet
from thinwire_lab.bench.processes import Processes
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.bench.worker_process import NoReplacements, wait_for

WORKERS = 4
MEGABYTE = 1 << 18
"""Float32 numbers in a megabyte."""
TARGET = 2.0
BY_HAND = "by hand"
SPARK = {"spark": ("float32", False), "spark, apart": ("float32", True), "spark in bfloat16": ("bfloat16", False)}
"""The codec, and whether each executor counts as a machine: agents of one machine are summed before they send."""


def wire(quick: bool, say: Say) -> Report:
    """Seconds of an exchange by wire and size; Spark's relative to a broadcast and a treeReduce of the arrays."""
    rows: list[Row] = []
    measured: dict[str, Any] = {"workers": WORKERS, "seconds": {}}
    sizes, turns, exchanges = ((1,), 1, 2) if quick else ((1, 10, 50), 2, 5)
    session = start_session(f"local-cluster[{WORKERS},2,2048]", WORKERS)
    ways: dict[str, Callable[[int], list[float]]] = {
        "mesh": lambda size: _on_loopback(
            "exchange_seconds", size, exchanges, codec="float32", gloo=False, interface="lo"
        ),
        "table": lambda size: _on_loopback("table_seconds", size, exchanges),
        BY_HAND: lambda size: _by_hand(session, size, exchanges),
    } | {
        name: functools.partial(_agents, session, exchanges=exchanges, codec=codec, apart=apart)
        for name, (codec, apart) in SPARK.items()
    }
    try:
        for name in (BY_HAND, *SPARK):  # warm-up: the JVM compiles code that runs often
            ways[name](MEGABYTE)
        for size_mb in sizes:
            found: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(turns):
                say(f"{size_mb} MB over each wire and by hand, turn {turn + 1} of {turns}")
                for name, measure in ways.items():
                    found[name] += measure(size_mb * MEGABYTE)
            measured["seconds"][f"{size_mb} MB"] = found
            middle = {name: statistics.median(times) for name, times in found.items()}
            detail = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in middle.items())
            for name in SPARK:
                ratios = tuple(middle[BY_HAND] / seconds for seconds in found[name])
                title = f"broadcast + treeReduce ÷ {name}"
                target = None if "apart" in name else TARGET
                rows.append(Row(title, f"{size_mb} MB", statistics.median(ratios), target, detail, ratios))
    finally:
        session.stop()
    return Report("wire", rows, measured)


def _on_loopback(task: str, size: int, exchanges: int, **options: Any) -> list[float]:
    """Seconds of each exchange on the slower worker, on loopback."""
    if task == "table_seconds":
        results = Processes(None, workers=WORKERS).run(task, {"size": size, "servers": WORKERS, "exchanges": exchanges})
        return [max(each) for each in zip(*(r["seconds"] for r in results), strict=True)]
    results = Processes(None, workers=WORKERS).run(task, options | {"size": size, "blocks": 1, "block": exchanges})
    return [max(each) for each in zip(*(r["ours"] for r in results), strict=True)]


def _agents(session: Any, size: int, exchanges: int, codec: str = "float32", apart: bool = False) -> list[float]:
    """Seconds of each exchange through agents that Spark's jobs visit."""
    run = SparkWire(uuid.uuid4().hex[:12], secrets.token_hex(16), apart=apart)
    hub = SparkHub(session, run, WORKERS)
    told: list[list[float]] = []

    def act() -> None:
        frame = session.range(0, WORKERS, 1, WORKERS)
        rows = frame.mapInArrow(functools.partial(_agent, run, size, exchanges, codec), "seconds string").collect()
        told.extend(json.loads(row["seconds"]) for row in rows)

    job = threading.Thread(target=act, daemon=True)
    job.start()
    try:
        policy = Policy(workers=WORKERS, deadlines=Deadlines(silence_s=60.0))
        Coordinator(hub, NoReplacements(), policy, emit=lambda event: None).run()
        job.join(30.0)
    finally:
        hub.close()
    return [max(each) for each in zip(*told, strict=True)]


def _agent(run: SparkWire, size: int, exchanges: int, codec: str, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa
    from pyspark import TaskContext

    for _ in batches:
        pass
    context = TaskContext.get()
    assert context is not None
    worker, attempt = context.partitionId(), int(context.taskAttemptId())
    joint = JointState(SparkNet(period=1), torch.zeros(size), WORKERS)
    seat = Identity(worker, attempt, hello() | {"rows": 1})
    trees = TreeCodec(encode, decode)
    link = run.link(worker, attempt)
    peer = Peer(link, seat, joint, trees=trees, carrier=THROUGH_SPARK, codec_name=codec, silence_s=120.0)
    peer.start("equal")
    wait_for(peer, Formed)
    times = []
    for _ in range(exchanges + 1):
        round, fragment = peer.claim()
        began = time.perf_counter()
        peer.launch(round, fragment, torch.from_numpy(_array(size, worker).copy()), 1.0, {})
        wait_for(peer, Landed)
        times.append(time.perf_counter() - began)
    peer.report(Bye(attempt=attempt))
    peer.close(30.0)
    assert joint.model is not None
    mean = sum(_array(size, each) for each in range(WORKERS)) / WORKERS
    if not np.allclose(joint.model.numpy(), mean, atol=1e-5 if codec == "float32" else 0.02):
        raise AssertionError("an exchange gave another mean than it should")
    yield pa.RecordBatch.from_pydict({"seconds": [json.dumps(times[1:])]})


@functools.lru_cache(maxsize=WORKERS)
def _array(size: int, worker: int) -> Any:
    """A worker's random numbers, made once; as hard to compress as a network's parameters."""
    return np.random.default_rng(worker).random(size, np.float32)


def _by_hand(session: Any, size: int, exchanges: int) -> list[float]:
    """SparkNet's Listing 3 in PySpark: arrays reduced in a tree, and their mean broadcast and read on every worker."""
    context = session.sparkContext
    places = context.parallelize(range(WORKERS), WORKERS)
    times = []
    for _ in range(exchanges + 1):
        began = time.perf_counter()
        total = places.map(functools.partial(_array, size)).treeReduce(np.add)
        mean = context.broadcast(total / WORKERS)
        firsts = places.map(functools.partial(_first, mean)).collect()
        times.append(time.perf_counter() - began)
        mean.destroy()
        assert all(abs(first - float(total[0]) / WORKERS) < 1e-5 for first in firsts)
    return times[1:]


def _first(mean: Any, place: int) -> float:
    return float(mean.value[0])
