"""Workers as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle

from thinwire.engine.coordinator import Exit
from thinwire.errors import ConfigError

Entry = Callable[[int, int], None]
"""What a worker process runs: a function of the worker's number and attempt."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """One process a worker, on this machine.

    Args:
        workers: how many.
        threads: torch threads of each; "auto" shares the processors out, so that workers do not fight over them.
        max_restarts: how many lost workers are replaced, over the whole run.
    """

    workers: int = 2
    threads: int | str = "auto"
    max_restarts: int = 8

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"cluster.workers = {self.workers} is too small; use 1 or more")
        if self.threads != "auto" and (not isinstance(self.threads, int) or self.threads < 1):
            raise ConfigError(f"cluster.threads = {self.threads!r} is not a count; use 1 or more, or 'auto'")

    host = "127.0.0.1"

    @property
    def threads_each(self) -> int:
        """Torch threads of one worker."""
        if isinstance(self.threads, int):
            return self.threads
        return max(1, _processors() // self.workers)

    def launch(self, entry: Entry) -> LocalWorkforce:
        """Starts the workers."""
        force = LocalWorkforce(self, cloudpickle.dumps(entry))
        for worker in range(self.workers):
            force.start(worker, 0)
        return force


class LocalWorkforce:
    """The running processes; see `thinwire.engine.coordinator.Workforce`."""

    def __init__(self, cluster: Local, payload: bytes) -> None:
        self._cluster, self._payload = cluster, payload
        self._running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._logs: dict[tuple[int, int], IO[bytes]] = {}
        self._restarts = 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by worker."""
        return {worker: process.pid for (worker, _), process in self._running.items()}

    def start(self, worker: int, attempt: int) -> None:
        """Starts one worker; its code travels through a pipe, so neither arguments nor environment hold a key."""
        threads = str(self._cluster.threads_each)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        log = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.cluster.child", str(worker), str(attempt), threads],
            stdin=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the driver, which then asks the workers to save and stop
        )
        assert process.stdin is not None
        try:
            process.stdin.write(len(self._payload).to_bytes(8, "big") + self._payload)
            process.stdin.flush()  # and the pipe stays open: its end tells the worker that the driver has gone
        except BrokenPipeError:
            pass  # it died at once: `exits` reports it
        self._running[worker, attempt] = process
        self._logs[worker, attempt] = log

    def exits(self) -> list[Exit]:
        found = []
        for key, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[key]
                found.append(Exit(*key, reason=_explain(code, self._tail(key))))
                self._close(key, process)
        return found

    def replace(self, worker: int, attempt: int) -> bool:
        if self._restarts >= self._cluster.max_restarts:
            return False
        self._restarts += 1
        old = self._running.pop((worker, attempt - 1), None)
        if old is not None:  # lost, but its process may still be there: it must not come back
            old.kill()
            old.wait()
            self._close((worker, attempt - 1), old)
        self.start(worker, attempt)
        return True

    def stop(self) -> None:
        """Ends what still runs: closed pipes first, then signals."""
        for process in self._running.values():
            if process.stdin is not None and not process.stdin.closed:
                with _ignoring_broken_pipes():
                    process.stdin.close()
        deadline = time.monotonic() + 3.0
        for process in self._running.values():
            try:
                process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for key, process in self._running.items():
            self._close(key, process)
        self._running.clear()

    def _close(self, key: tuple[int, int], process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None and not process.stdin.closed:
            with _ignoring_broken_pipes():
                process.stdin.close()
        self._logs.pop(key).close()

    def _tail(self, key: tuple[int, int]) -> str:
        log = self._logs[key]
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 2000))
        return log.read().decode(errors="replace").strip()


class _ignoring_broken_pipes:  # noqa: N801 - reads as a word
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        return isinstance(value, BrokenPipeError)


def _explain(code: int, tail: str) -> str:
    if code < 0:
        reason = f"its process was killed by {signal.Signals(-code).name}"
    else:
        reason = f"its process ended with exit code {code}"
    return f"{reason}; its last words:\n{tail}" if tail else reason


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
