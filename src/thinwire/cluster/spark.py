"""Workers as tasks of a Spark job. Importing this module starts no JVM; pyspark is loaded at the first use of a
cluster.

A worker is a task of the DataFrame's own lineage: it reads its partition, writes it to local files, and trains until
the run is over. There is no barrier stage, so Spark runs a lost task again elsewhere while the others go on::

    df ─ repartition(K) ─ persist on two executors ─ mapInArrow(worker) ─ collect()      in a thread of the driver
                                                          │
                                      coordinator ◀───────┘  joins as worker = partition, attempt = the task's
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import traceback
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from thinwire.cluster.base import Dealt, DriverData, Entry, Expected, sockets
from thinwire.cluster.frames import FrameData, framed, is_frame
from thinwire.cluster.local import Local, LocalWorkforce
from thinwire.cluster.preflight import examine
from thinwire.cluster.process import make_own
from thinwire.cluster.sessions import (
    cancel,
    driver_host,
    find_session,
    gpu_given,
    is_remote,
    job_runner,
    setting,
    slots,
)
from thinwire.cluster.shipping import packed
from thinwire.coordinator.ports import Exit
from thinwire.errors import ConfigError, TimedOutError
from thinwire.exchange.spark.slots import agents_description
from thinwire.placement import between_processes, part_of
from thinwire.protocol.clock import REAL
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.forms import header_of
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import ANY_ATTEMPT, COORDINATOR, Failed, Join
from thinwire.protocol.observation import unobserved
from thinwire.records import is_rdd
from thinwire.replicas import TorchReplica
from thinwire.transport.ports import Hub, Wire
from thinwire.values import check_fields, count_or_auto, optional, truth, whole

GATHER_S = 10.0
RETURNS = "worker int, attempt bigint, host string, pid int"


@dataclass(frozen=True, kw_only=True)
class Spark:
    """Workers as tasks of a Spark cluster, one slot each.

    Args:
        workers: number of workers; None takes one for each task slot that the cluster has now.
        session: the SparkSession; None takes the session of the data, the active session, or starts one.
        master: master of a session to start, such as "spark://host:7077"; None embeds Spark in this process.
        threads: torch threads of each worker; "auto" takes the cores that Spark gives a task.
        repartition: whether rows are first dealt evenly to workers. "auto" deals them unless a DataFrame comes straight
            from files, in at least one partition for each worker.
        host: this machine's address as executors see it; None takes Spark's own.
        preflight: whether to check the executors before the run starts.
    """

    workers: int | None = None
    session: Any = field(default=None, repr=False, compare=False)
    master: str | None = None
    threads: int | str = "auto"
    repartition: bool | str = "auto"
    host: str | None = None
    preflight: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "cluster", workers=optional(whole(1)), threads=count_or_auto, preflight=truth)
        if self.repartition not in (True, False, "auto"):
            raise ConfigError(f"cluster.repartition = {self.repartition!r} is not known; use true, false or 'auto'")

    def site(self, data: Any) -> SparkSite:
        """The cluster as it is now."""
        session = find_session(self.session, data, self.master, self.workers)
        workers = self.workers or slots(session)
        if workers is None:
            raise ConfigError("over Spark Connect the number of workers is not known; write tw.Spark(workers=8)")
        return SparkSite(self, session, workers, self.host or driver_host(session))


class SparkSite:
    """A Spark cluster with its session; see `thinwire.cluster.base.Site`."""

    in_process = False
    time = REAL
    prefetch = None
    replica = TorchReplica
    crew = staticmethod(between_processes)
    part = staticmethod(part_of)
    observe = staticmethod(unobserved)

    def __init__(self, cluster: Spark, session: Any, workers: int, host: str) -> None:
        self.cluster, self.session, self.workers, self.host = cluster, session, workers, host

    def deadlines(self, given: Deadlines | None) -> Deadlines:
        """Tasks start when slots are free, so by default workers that have joined wait only briefly for others."""
        return given or replace(Deadlines(), gather_s=GATHER_S)

    def open(self, data: Any, validation: Any) -> FrameData | DriverData:
        if isinstance(data, str) and self._is_table_or_files(data):
            data = self.session.read.parquet(data)
        if is_frame(data) or is_rdd(data):
            # An RDD's plan does not show its shuffles: its rows are dealt out unless the caller says not to.
            deals = True if is_rdd(data) and self.cluster.repartition == "auto" else self.cluster.repartition
            return FrameData(framed(data), framed(validation), self.workers, deals)
        return DriverData(data, validation, self.workers, shared_disk=False)

    def expect(self) -> Expected:
        """No estimates: a measurement would take a job."""
        return Expected()

    def wire(self) -> tuple[Hub, Wire]:
        return sockets(self.host, None)

    def needs_jobs(self) -> Any:
        if is_remote(self.session):
            raise ConfigError(
                "exchange = 'spark' needs Spark's own broadcasts, which Spark Connect does not have; use 'mesh'"
            )
        return self.session

    def look(self, out: str | None, *, ports: bool = True) -> None:
        """Raises ConfigError for a cluster on which the run could not work, and says what to change."""
        if self.cluster.preflight:
            findings = examine(self.session, self.workers, self.host, out, ports=ports)
            findings.refuse()
            for warning in findings.warnings:
                warnings.warn(warning, stacklevel=2)

    def launch(self, entry: Entry, dealt: Dealt, wire: Wire, helpers: int = 0) -> SparkWorkforce:
        """Starts the job whose tasks are the workers, and helpers as processes on the driver's machine."""
        threads = self.cluster.threads
        if not isinstance(threads, int):
            threads = int(setting(self.session, "spark.task.cpus", "1"))
        frame, kept = dealt.frame or (self.session.range(0, self.workers, 1, self.workers), False)
        payload = packed(entry)
        beside = LocalWorkforce(Local(workers=helpers, threads=1), payload) if helpers else None
        for worker in range(self.workers, self.workers + helpers):
            assert beside is not None
            beside.start(worker, 0)
        task = functools.partial(_task, payload, wire, threads)
        run = getattr(wire, "run", "")  # jobs that visit agents find their tasks by this name
        return SparkWorkforce(self.session, frame, kept, task, self.workers, beside, run)

    def _is_table_or_files(self, name: str) -> bool:
        """Whether executors read a path themselves: folders and globs of Parquet files, and URLs."""
        return name.endswith((".parquet", ".pq")) or (os.path.isdir(name) and _has_parquet(name)) or "://" in name


class SparkWorkforce:
    """The running job; see `thinwire.coordinator.ports.Workforce`. Spark itself replaces lost workers."""

    revives = True

    def __init__(
        self,
        session: Any,
        frame: Any,
        kept: bool,
        task: Any,
        workers: int,
        beside: LocalWorkforce | None = None,
        run: str = "",
    ) -> None:
        self._session, self._frame, self._kept, self._workers = session, frame, kept, workers
        self._beside = beside
        self._tag = f"thinwire-{uuid.uuid4().hex[:8]}"
        self._error: BaseException | None = None
        self._told = False
        self._job = job_runner(session, self._tag, agents_description(workers, run), functools.partial(self._run, task))
        self._job.start()

    def _run(self, task: Any) -> None:
        try:
            self._frame.mapInArrow(task, RETURNS).collect()
        except BaseException as error:
            self._error = error

    def exits(self) -> list[Exit]:
        """Empty while the job lives: a lost task shows by its broken connection, and Spark starts it again."""
        helpers = [] if self._beside is None else self._beside.exits()
        if self._job.is_alive() or self._error is None or self._told:
            return helpers
        self._told = True
        reason = f"the Spark job ended: {_told(self._error)}"
        return helpers + [Exit(worker, ANY_ATTEMPT, reason) for worker in range(self._workers)]

    def replace(self, worker: int, attempt: int) -> bool:
        if worker >= self._workers:
            return self._beside is not None and self._beside.replace(worker, attempt)
        return self._job.is_alive()

    def stop(self) -> None:
        """Cancels the job, after a moment for workers that said good-bye to end their tasks."""
        self._job.join(5.0)
        if self._beside is not None:
            self._beside.stop()
        if self._job.is_alive():
            cancel(self._session, self._tag)
            self._job.join(20.0)
        if self._kept:
            with contextlib.suppress(Exception):  # the session may have ended
                self._frame.unpersist()


def _task(payload: bytes, wire: Wire, threads: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Runs one worker on an executor.

    Spark retries a task whose process has died or that has lost contact to the driver. An error of user code is
    reported to the coordinator instead, and the task ends successfully.
    """
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    worker, attempt = context.partitionId(), int(context.taskAttemptId())
    make_own(threads)
    try:
        entry: Entry = cloudpickle.loads(payload)  # trusted: from the driver, through Spark
    except Exception as error:
        _fail(wire.link(worker, attempt), attempt, error)
    else:
        if not entry(worker, attempt, first=context.attemptNumber() == 0, given=batches, gpu=gpu_given()):
            raise TimedOutError(
                f"attempt {attempt} of worker {worker} no longer hears the driver, or a newer one has its place; "
                "Spark starts it again where that is needed"
            )
    for _ in batches:  # Spark requires that a task reads all of its input
        pass
    columns = {"worker": [worker], "attempt": [attempt], "host": [socket.gethostname()], "pid": [os.getpid()]}
    schema = pa.schema([("worker", pa.int32()), ("attempt", pa.int64()), ("host", pa.string()), ("pid", pa.int32())])
    yield pa.RecordBatch.from_pydict(columns, schema=schema)


def _fail(link: Any, attempt: int, error: Exception) -> None:
    """Reports an error that occurred before the worker's own code could be loaded."""
    link.send(COORDINATOR, header_of(Join(attempt=attempt, address=link.address, **hello())))
    failed = Failed(
        attempt=attempt,
        kind=type(error).__name__,
        error=f"{type(error).__name__}: {error}; install what the model needs on the executors",
        traceback=traceback.format_exc(),
    )
    link.send(COORDINATOR, header_of(failed))
    link.close()


def _told(error: BaseException) -> str:
    """The message of an executor's Python, without the JVM's stack trace around it."""
    lines = [line for line in str(error).splitlines() if not line.lstrip().startswith(("at ", "... "))]
    return "\n".join(lines if len(lines) <= 24 else [*lines[:4], "…", *lines[-20:]])


def _has_parquet(folder: str) -> bool:
    return any(name.endswith((".parquet", ".pq")) for _, _, names in os.walk(folder) for name in names)
