"""Checks every executor before a run: its packages, the addresses it can reach, and what has to change.

The probe runs on executors that may lack thinwire, so it uses Python's own library only and travels by value.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import platform
import secrets
import selectors
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from thinwire.cluster.sessions import cancel, is_remote, job_runner, setting, slots
from thinwire.errors import ConfigError, TimedOutError
from thinwire.exchange.spark.slots import machines, may_grow, too_little_room

PACKAGES = ("torch", "thinwire", "pyarrow", "pyzmq", "numpy")
GATHER_S = 4.0
PROBE_S = 120.0
LEAST_MEMORY = 1 << 30


@dataclass(frozen=True)
class Probe:
    """What one task has found on its executor."""

    task: int
    host: str
    address: str
    python: str
    executable: str
    packages: dict[str, str | None]
    memory_bytes: int | None
    disk_bytes: int | None
    cores: int | None
    driver: str | None
    """Why the task could not reach the driver; None where it could."""
    peers: dict[str, str | None]
    """By address of another task, why it could not be reached; None where it could."""
    sees_out: bool
    """Whether the executor sees the same run's folder as the driver."""


@dataclass
class Findings:
    """The findings of all probes together."""

    probes: list[Probe]
    workers: int
    slots: int | None
    driver: str
    problems: list[str] = field(default_factory=list)
    """Reasons why a run is impossible, each with what to change."""
    warnings: list[str] = field(default_factory=list)
    rows: list[int] | None = None
    """Rows of each future worker, where data was given."""

    def deal(self, rows: list[int]) -> None:
        """Sets the rows that each worker would get, and warns of workers without rows."""
        self.rows = rows
        empty = [worker for worker, count in enumerate(rows) if not count]
        if not sum(rows):
            self.problems.append("the data has no rows")
        elif empty:
            self.warnings.append(
                f"{len(empty)} of {len(rows)} partitions are empty ({', '.join(map(str, empty[:8]))}): their workers "
                "would have no rows to train on; leave out repartition=False, or ask for fewer workers"
            )

    def refuse(self) -> None:
        """Raises ConfigError where a run is impossible."""
        if self.problems:
            listed = "\n".join(f"  - {problem}" for problem in self.problems)
            raise ConfigError(f"the Spark cluster is not ready for {self.workers} workers:\n{listed}")


def examine(
    session: Any,
    workers: int,
    host: str,
    out: str | None = None,
    *,
    ports: bool = True,
    timeout_s: float = PROBE_S,
) -> Findings:
    """Runs one probe task for each future worker.

    Args:
        session: the session of the cluster.
        workers: number of future workers.
        host: this machine's address, as executors see it.
        out: the run's folder, if it has one.
        ports: whether workers will reach this machine and each other by ports of their own; if not, no port is opened.
        timeout_s: seconds to wait for the tasks.
    """
    token = secrets.token_hex(16)
    rendezvous = _Rendezvous(host, workers, token) if ports else None
    port = rendezvous.port if rendezvous else 0
    try:
        with _marked(out) as mark:
            rows = _run(session, workers, _probe_task(host, port, token, PACKAGES, mark), timeout_s)
    finally:
        if rendezvous is not None:
            rendezvous.close()
    probes = [Probe(**json.loads(row)) for row in rows]
    findings = Findings(probes, workers, slots(session), f"{host}:{port}")
    _check_probes(findings, session)
    if not ports and setting(session, "spark.locality.wait", "3s") in ("0", "0s", "0ms"):
        findings.problems.append(
            "spark.locality.wait is 0, so that Spark starts tasks on any machine; exchange='spark' has to reach its "
            "workers' machines: leave the setting at its default"
        )
    if not ports:
        _check_free_slots(findings, session)
    blind = sorted({p.host for p in probes if not p.sees_out})
    if blind:
        findings.problems.append(
            f"{', '.join(blind[:4])} cannot see out={out!r} of this machine, where workers write their checkpoints; "
            "name a folder that all machines share, or a URL such as hdfs://… or s3://…"
        )
    return findings


def _check_free_slots(findings: Findings, session: Any) -> None:
    """Whether a run with `exchange="spark"` leaves a slot on each machine for the jobs that visit its workers."""
    if is_remote(session):
        return
    there = machines(session.sparkContext)
    told = too_little_room(there, findings.workers)
    if not told:
        return
    most = int(setting(session, "spark.dynamicAllocation.maxExecutors", str(2**31 - 1)))
    each = max((machine.slots // len(machine.executors) - 1 for machine in there), default=0)
    # jobs that wait for a slot make Spark ask for more executors
    if may_grow(session.sparkContext) and most * each >= findings.workers:
        findings.warnings.append(f"the executors that are there now are too few: {told}")
    else:
        findings.problems.append(told)


@contextlib.contextmanager
def _marked(out: str | None) -> Iterator[str | None]:
    """A file in the run's folder that executors look for; None for a URL, which is the same everywhere."""
    if out is None or "://" in out:
        yield None
        return
    try:
        os.makedirs(out, exist_ok=True)
        mark = tempfile.NamedTemporaryFile(dir=os.path.abspath(out), prefix=".seen-")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"out={out!r} cannot be written to: {error}; name another folder") from error
    with mark:
        yield mark.name


def _check_probes(findings: Findings, session: Any) -> None:
    problems, warnings = findings.problems, findings.warnings
    own = {name: _version(name) for name in PACKAGES}
    for name in PACKAGES:
        lacking = sorted({p.host for p in findings.probes if p.packages[name] is None})
        if lacking:
            where = findings.probes[0].executable
            problems.append(
                f"{len(lacking)} of {_hosts(findings)} hosts lack {name} ({', '.join(lacking[:4])}): install it for "
                f"{where} there, or set PYSPARK_PYTHON to a Python that has it"
            )
        for probe in findings.probes:
            there, here = probe.packages[name], own[name]
            if there and here and _short(there) != _short(here):
                sort = problems if name == "thinwire" else warnings
                sort.append(f"{name} is {there} on {probe.host} and {here} here; install the same version on both")
                break
    here = platform.python_version()
    for probe in findings.probes:
        if _short(probe.python) != _short(here):
            problems.append(f"Python is {probe.python} on {probe.host} and {here} here; use one minor version")
            break
    for probe in findings.probes:
        if probe.driver is not None:
            problems.append(
                f"{probe.host} cannot reach this machine at {findings.driver} ({probe.driver}); open that port, or "
                "name "
                "an address that executors can reach: tw.Spark(host=…)"
            )
        for peer, why in probe.peers.items():
            if why is not None:
                problems.append(f"{probe.host} cannot reach a worker at {peer} ({why}); open ports between executors")
        if probe.memory_bytes is not None and probe.memory_bytes < LEAST_MEMORY:
            free = probe.memory_bytes >> 20
            warnings.append(f"{probe.host} has {free} MiB of memory left; a worker lives beside the executor's JVM")
    if findings.slots is not None and findings.slots < findings.workers:
        warnings.append(
            f"{findings.workers} workers are asked for and there are {findings.slots} slots; training starts with "
            "the workers that have slots, and the others join as slots become free"
        )
    if setting(session, "spark.speculation", "false").lower() == "true":
        warnings.append("spark.speculation is on: a slow worker's twin takes its place; turn it off for training")
    failures = int(setting(session, "spark.task.maxFailures", "4"))
    local = setting(session, "spark.master", "").startswith("local[")
    if failures < 8 and not is_remote(session) and not local:
        warnings.append(
            f"spark.task.maxFailures is {failures}: Spark ends the job when one worker is lost that many times; set it "
            "to 100"
        )


def _run(session: Any, workers: int, probe: Callable[[Iterator[Any]], Iterator[Any]], timeout_s: float) -> list[str]:
    found: list[str] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            frame = session.range(0, workers, 1, workers).mapInArrow(probe, "found string")
            found.extend(row["found"] for row in frame.collect())
        except BaseException as error:
            errors.append(error)

    tag = f"thinwire-preflight-{uuid.uuid4().hex[:8]}"
    job = job_runner(session, tag, "thinwire: preflight", act)
    job.start()
    job.join(timeout_s)
    if job.is_alive():
        cancel(session, tag)
        raise TimedOutError(
            f"no answer from {workers} tasks within {timeout_s:.0f} s; check that executors have free slots"
        )
    if errors:
        raise ConfigError(_explained(errors[0])) from errors[0]
    return found


def _explained(error: BaseException) -> str:
    text = str(error)
    for name in ("pyarrow", "pandas"):
        if f"No module named '{name}'" in text or (name == "pandas" and "Pandas >=" in text):
            return (
                f"the executors' Python lacks {name}, which Spark needs for Arrow: set PYSPARK_PYTHON to a Python that "
                "has thinwire[spark] installed, before the session starts"
            )
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    return "a first task on the executors failed:\n" + "\n".join(lines[-12:])


class _Rendezvous:
    """Server at which probes exchange their addresses as plain text; nothing that they send is executed."""

    def __init__(self, host: str, expected: int, token: str) -> None:
        self._expected, self._token = expected, token
        self._server = socket.create_server((host, 0))
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="preflight", daemon=True)
        self._open = True
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join(GATHER_S + 2.0)
        self._server.close()

    def _serve(self) -> None:
        waiting: list[tuple[socket.socket, str]] = []
        last, told = time.monotonic(), 0
        with selectors.DefaultSelector() as ready:
            ready.register(self._server, selectors.EVENT_READ)
            while self._open:
                if ready.select(0.2):
                    with contextlib.suppress(OSError):
                        guest, _ = self._server.accept()
                        guest.settimeout(2.0)
                        token, _, address = guest.makefile().readline(200).strip().partition(" ")
                        if not hmac.compare_digest(token.encode(), self._token.encode()):
                            guest.close()  # without the token its address is not passed on
                            continue
                        waiting.append((guest, address))
                        last = time.monotonic()
                full = len(waiting) >= self._expected - told
                if waiting and (full or time.monotonic() - last > GATHER_S):
                    self._tell(waiting)
                    told, waiting = told + len(waiting), []
        self._tell(waiting)

    def _tell(self, waiting: list[tuple[socket.socket, str]]) -> None:
        told = (json.dumps([address for _, address in waiting if address]) + "\n").encode()
        for guest, _ in waiting:
            with contextlib.suppress(OSError):
                guest.sendall(told)
        deadline = time.monotonic() + 3.0 * len(waiting) + 3.0
        for guest, _ in waiting:
            with contextlib.suppress(OSError):
                guest.settimeout(max(0.1, deadline - time.monotonic()))
                guest.recv(16)
        for guest, _ in waiting:
            with contextlib.suppress(OSError), guest:
                guest.sendall(b"bye\n")


def _rendezvous() -> Callable[[str, int, str], tuple[Any, str, str | None, dict[str, str | None]]]:
    """Makes the function by which a task tries to reach the driver and the other tasks; it travels by value."""

    def meet(host: str, port: int, token: str) -> tuple[Any, str, str | None, dict[str, str | None]]:
        import json
        import socket

        peers: dict[str, str | None] = {}
        listener, here = None, "?"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            try:
                own.connect((host, port or 9))  # nothing is sent
                here = own.getsockname()[0]
                if not port:
                    return None, here, None, {}
                listener = socket.create_server((here, 0))
                mine = f"{here}:{listener.getsockname()[1]}"
                with socket.create_connection((host, port), timeout=5.0) as meeting:
                    meeting.sendall(f"{token} {mine}\n".encode())
                    meeting.settimeout(30.0)
                    said = meeting.makefile()
                    for address in (a for a in json.loads(said.readline()) if a != mine):
                        name, _, number = address.rpartition(":")
                        try:
                            socket.create_connection((name, int(number)), timeout=3.0).close()
                            peers[address] = None
                        except OSError as error:
                            peers[address] = str(error)
                    meeting.sendall(b"done\n")
                    said.readline()  # wait until all are done: the others still connect to this listener
            except (OSError, ValueError) as error:
                return listener, here, str(error) if port else None, peers
        return listener, here, None, peers

    return meet


def _probe_task(
    host: str, port: int, token: str, packages: tuple[str, ...], mark: str | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Makes the probe, a function that travels by value and therefore does its own imports."""
    meet = _rendezvous()

    def probe(batches: Iterator[Any]) -> Iterator[Any]:
        import json
        import os
        import platform
        import shutil
        import socket
        import sys
        import tempfile
        from importlib import metadata

        import pyarrow as pa
        from pyspark import TaskContext

        for _ in batches:
            pass
        listener, here, driver, peers = meet(host, port, token)
        versions: dict[str, str | None] = {}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        memory = None
        if os.path.exists("/proc/meminfo"):
            with open("/proc/meminfo") as file:
                memory = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable")), None)
        found = {
            "task": TaskContext.get().partitionId(),  # type: ignore[union-attr]
            "host": socket.gethostname(),
            "address": here,
            "python": platform.python_version(),
            "executable": sys.executable,
            "packages": versions,
            "memory_bytes": memory,
            "disk_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
            "cores": os.cpu_count(),
            "driver": driver,
            "peers": peers,
            "sees_out": mark is None or os.path.exists(mark),
        }
        yield pa.RecordBatch.from_pydict({"found": [json.dumps(found)]})
        if listener is not None:
            listener.close()

    return probe


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _short(version: str) -> str:
    """Major and minor version.

    >>> _short("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def _hosts(findings: Findings) -> int:
    return len({p.host for p in findings.probes})
