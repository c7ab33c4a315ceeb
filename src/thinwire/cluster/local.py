"""Workers as processes or threads of this machine."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.cluster.base import Dealt, DriverData, Entry, Expected, sockets
from thinwire.cluster.fork_server import shared
from thinwire.cluster.loopback import loopback
from thinwire.cluster.shipping import packed
from thinwire.coordinator.ports import Exit
from thinwire.errors import ConfigError
from thinwire.placement import Crew, between_processes, part_of
from thinwire.protocol.clock import REAL
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.observation import unobserved
from thinwire.replicas import TorchReplica
from thinwire.transport.memory import MemoryHub, Room
from thinwire.transport.ports import Hub, Wire
from thinwire.values import check_fields, count_or_auto, truth, whole


@dataclass(frozen=True, kw_only=True)
class Local:
    """Each worker as a process of this machine.

    Args:
        workers: number of workers.
        threads: torch threads of each worker; "auto" divides the processors among the workers.
        max_restarts: number of lost workers that are replaced over the whole run.
        processes: False runs workers as threads of this process instead, where a debugger reaches them. The threads
        share
            one random generator and one interpreter lock, and none can be lost.
    """

    workers: int = 2
    threads: int | str = "auto"
    max_restarts: int = 8
    processes: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "cluster", workers=whole(1), max_restarts=whole(0), threads=count_or_auto, processes=truth)

    time = REAL
    prefetch = None
    replica = TorchReplica
    part = staticmethod(part_of)
    observe = staticmethod(unobserved)

    def site(self, data: Any) -> Local:
        """This machine, for any data. Starts the fork server now, while the data is read."""
        if self.processes:
            shared()
        return self

    @property
    def crew(self) -> Callable[..., Crew] | None:
        return None if self.in_process else between_processes

    @property
    def in_process(self) -> bool:
        return not self.processes

    def expect(self) -> Expected:
        return Expected(loopback())

    def deadlines(self, given: Deadlines | None) -> Deadlines:
        return given or Deadlines()

    def open(self, data: Any, validation: Any) -> DriverData:
        return DriverData(data, validation, self.workers, shared_disk=True)

    @property
    def threads_each(self) -> int:
        """Torch threads of one worker."""
        if isinstance(self.threads, int):
            return self.threads
        return max(1, _processors() // self.workers)

    def look(self, out: str | None, *, ports: bool = True) -> None:
        """Checks nothing: workers run on this machine."""

    def wire(self) -> tuple[Hub, Wire]:
        if self.processes:
            return sockets("127.0.0.1", "127.0.0.1")
        room = Room()
        return MemoryHub(room), room

    def needs_jobs(self) -> Any:
        raise ConfigError("exchange = 'spark' needs cluster=tw.Spark(…); on this machine alone use 'mesh'")

    def launch(self, entry: Entry, dealt: Dealt, wire: Wire, helpers: int = 0) -> LocalWorkforce | ThreadWorkforce:
        """Starts the workers, and helpers in the same way."""
        if not self.processes:
            return ThreadWorkforce(entry, self.workers + helpers)
        force = LocalWorkforce(self, packed(entry))
        for worker in range(self.workers + helpers):
            force.start(worker, 0)
        return force


class LocalWorkforce:
    """The running processes; see `thinwire.coordinator.ports.Workforce`."""

    revives = False

    def __init__(self, cluster: Local, payload: bytes) -> None:
        self._cluster, self._payload = cluster, payload
        self._fork_server = shared()
        self._logs = tempfile.TemporaryDirectory(prefix="thinwire-logs-")
        self._running: dict[tuple[int, int], int] = {}
        self._restarts = 0

    def start(self, worker: int, attempt: int) -> None:
        """Starts one worker. Its code travels through a pipe: no key appears in arguments or the environment."""
        log = self._log(worker, attempt)
        threads = self._cluster.threads_each
        self._running[worker, attempt] = self._fork_server.start(self._payload, worker, attempt, threads, log)

    def exits(self) -> list[Exit]:
        self._fork_server.poll()
        found = []
        for key, token in list(self._running.items()):
            code = self._fork_server.endings.pop(token, None)
            if code is None and self._fork_server.alive:
                continue
            del self._running[key]
            gone = "the process that starts workers has ended"
            reason = gone if code is None else _explain(code, self._tail(*key))
            found.append(Exit(*key, reason=reason))
        return found

    def replace(self, worker: int, attempt: int) -> bool:
        if self._restarts >= self._cluster.max_restarts:
            return False
        self._restarts += 1
        old = self._running.pop((worker, attempt - 1), None)
        if old is not None:  # a lost worker's process may still run, and must not come back
            self._fork_server.kill(old)
        if not self._fork_server.alive:
            self._fork_server = shared()
        self.start(worker, attempt)
        return True

    def stop(self) -> None:
        """Ends the processes that still run, after a moment for workers that said good-bye to exit by themselves."""
        deadline = time.monotonic() + 3.0
        while self._running and self._fork_server.alive and time.monotonic() < deadline:
            self.exits()
            time.sleep(0.01)
        for token in self._running.values():
            self._fork_server.kill(token)
        self._running.clear()
        self._logs.cleanup()

    def _log(self, worker: int, attempt: int) -> str:
        return os.path.join(self._logs.name, f"{worker}.{attempt}")

    def _tail(self, worker: int, attempt: int) -> str:
        path = self._log(worker, attempt)
        if not os.path.exists(path):
            return ""
        with open(path, "rb") as log:
            log.seek(max(0, os.path.getsize(path) - 2000))
            return log.read().decode(errors="replace").strip()


class ThreadWorkforce:
    """Workers as threads; see `thinwire.coordinator.ports.Workforce`."""

    revives = False

    def __init__(self, entry: Entry, workers: int) -> None:
        self._threads = [
            threading.Thread(target=entry, args=(worker, 0), name=f"worker-{worker}", daemon=True)
            for worker in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def exits(self) -> list[Exit]:
        return []

    def replace(self, worker: int, attempt: int) -> bool:
        return False

    def stop(self) -> None:
        """Waits for the threads: workers end with the run, or when they no longer hear the driver."""
        for thread in self._threads:
            thread.join(3.0)


def _explain(code: int, tail: str) -> str:
    if code < 0:
        reason = f"its process was killed by {signal.Signals(-code).name}"
    else:
        reason = f"its process ended with exit code {code}"
    return f"{reason}; its last output:\n{tail}" if tail else reason


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
