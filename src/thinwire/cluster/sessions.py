"""The differences between Spark's own sessions and those of Spark Connect, in one place."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from thinwire.errors import ConfigError
from thinwire.records import is_rdd

CONNECT_PORT = 15002
KNOCK_S = 10.0


def is_remote(session: Any) -> bool:
    """Whether a session is of Spark Connect: without a JVM here, RDDs or a SparkContext."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def find_session(given: Any, data: Any, master: str | None, workers: int | None) -> Any:
    """The session of the data, the active session, or a new one for `master`."""
    if given is not None:
        return given
    if type(data).__module__.startswith("pyspark.sql"):
        return data.sparkSession
    if is_rdd(data):
        from pyspark.sql import SparkSession as Session

        return Session.builder.getOrCreate()  # the session of the RDD's context
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError("cluster = Spark needs pyspark; install it with: pip install 'thinwire[spark]'") from error
    active = SparkSession.getActiveSession()
    if active is not None and master is None:
        return active
    return start_session(master, workers or 2)


def start_session(master: str | None, workers: int) -> Any:
    """Starts a session of this process; without a master, Spark runs embedded with one slot for each worker."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # executors on this machine use the driver's Python
    from pyspark.sql import SparkSession

    try:
        return _started(SparkSession.builder, master, workers)
    except Exception as error:  # errors of py4j, pyspark and Connect have no other common base
        java = [line.lstrip(": ") for line in str(error).splitlines() if line.startswith(": ")]
        why = java[0] if java else str(error).partition("\n")[0]
        raise ConfigError(
            f"master = {master!r} gave no Spark session ({why}); it is an address such as spark://host:7077, yarn, "
            "k8s://https://host:6443 or sc://host. Check that the master runs and can be reached from here, and read "
            "Spark's own messages above."
        ) from error


def _started(builder: Any, master: str | None, workers: int) -> Any:
    if master is not None and master.startswith("sc://"):
        _knock(master)
        return builder.remote(master).getOrCreate()
    builder = builder.appName("thinwire").master(master or f"local[{workers},1000]")
    if master is None or master.startswith("local"):
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.task.maxFailures", "1000")  # a lost executor counts as a failure of its tasks
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _knock(master: str) -> None:
    """Fails fast where nothing listens at a Spark Connect address: its client would retry for many minutes."""
    at = urlsplit(master)
    with socket.create_connection((at.hostname or "", at.port or CONNECT_PORT), timeout=KNOCK_S):
        return


def slots(session: Any) -> int | None:
    """Task slots that the cluster has now; None where it does not tell."""
    if is_remote(session):
        return None
    context = session.sparkContext
    with contextlib.suppress(Exception):  # internal to Spark; counts cores, GPUs and what a task needs
        scala = context._jsc.sc()
        found = int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
        if found > 0:
            return found
    cpus = int(context.getConf().get("spark.task.cpus", "1"))
    return max(1, int(context.defaultParallelism) // cpus)


def setting(session: Any, name: str, default: str) -> str:
    """One of Spark's settings, as a text."""
    if not is_remote(session):
        return str(session.sparkContext.getConf().get(name, default))
    try:
        return str(session.conf.get(name, default))
    except Exception:  # a static setting that Connect does not give
        return default


def driver_host(session: Any) -> str:
    """An address of this machine that executors can reach."""
    named = setting(session, "spark.driver.host", "")
    for name in (named, socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name) if name else ""
            if address and _is_here(address):
                return address
    if is_remote(session):
        return _towards(session)
    return "127.0.0.1"


def job_runner(session: Any, tag: str, description: str, act: Callable[[], Any]) -> threading.Thread:
    """A thread, not yet started, that runs Spark jobs under a tag by which they can be cancelled.

    The jobs also have the caller's job group and scheduler pool, so that `cancelJobGroup` ends them.
    """
    context = None if is_remote(session) else session.sparkContext
    names = ("spark.jobGroup.id", "spark.scheduler.pool")
    given = {} if context is None else {name: context.getLocalProperty(name) for name in names}

    def run() -> None:
        if context is None:
            session.addTag(tag)
        else:
            context.setJobGroup(given["spark.jobGroup.id"] or tag, description, interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", given["spark.scheduler.pool"])
            context.addJobTag(tag)
        act()

    return threading.Thread(target=run, name=f"spark-{tag}", daemon=True)


def cancel(session: Any, tag: str) -> None:
    """Ends all jobs under a tag."""
    with contextlib.suppress(Exception):  # the session itself may have ended
        if is_remote(session):
            session.interruptTag(tag)
        else:
            session.sparkContext.cancelJobsWithTag(tag)


def gpu_given() -> int | None:
    """On an executor, the GPU that Spark has reserved for this task (`spark.task.resource.gpu.amount`), if any."""
    from pyspark import TaskContext

    context = TaskContext.get()
    given = context.resources().get("gpu") if context is not None else None
    address = given.addresses[0] if given is not None and given.addresses else ""
    return int(address) if address.isdigit() else None


def _is_here(address: str) -> bool:
    """Whether this machine can listen at an address."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _towards(session: Any) -> str:
    """The address of this machine on the route to a Connect server."""
    host = str(getattr(session.client, "host", None) or "127.0.0.1")
    host = os.environ.get("THINWIRE_HOST", host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
