"""The driver's end of a benchmark: starts a coordinator and workers on their nodes, and collects their results."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from thinwire.errors import TimedOutError, WorkerError
from thinwire_lab.bench.worker_process import make_keys
from thinwire_lab.testbed import Testbed

MEETING_PORT = 29500


class Processes:
    """Processes of one benchmark: a coordinator and workers, on a testbed's nodes or on loopback.

    A testbed needs one more node than workers: the last node is the coordinator's.
    """

    def __init__(self, bed: Testbed | None, *, workers: int = 2, threads: int = 1, plain: bool = False) -> None:
        self._bed, self._workers, self._threads, self._plain = bed, workers, threads, plain
        self._running: list[tuple[subprocess.Popen[str], IO[str]]] = []

    def run(self, task: str, options: dict[str, Any], *, timeout_s: float = 300.0) -> list[Any]:
        """Runs a task of `thinwire_lab.bench.child` on every worker; returns their results in order."""
        keys = make_keys()
        try:
            hub = {"task": "coordinate", "host": self._host(self._workers), "workers": self._workers}
            coordinator = self._start(self._workers, hub | {"keys": keys, "plain": self._plain})
            assert coordinator.stdout is not None
            said = coordinator.stdout.readline()
            if not said:
                raise WorkerError(f"the benchmark's coordinator did not start: {self._tail(coordinator)}")
            address = json.loads(said)["address"]
            first = self._host(0)
            port = MEETING_PORT if self._bed else _free_port()
            for worker in range(self._workers):
                place = {"worker": worker, "workers": self._workers, "host": self._host(worker), "keys": keys}
                place |= {"coordinator": address, "first": first, "port": port}
                order = {"task": task, "threads": self._threads, "place": place, "options": options}
                self._start(worker, order | {"plain": self._plain})
            return [self._result(p, timeout_s) for p, _ in self._running[1:]]
        finally:
            self.close()

    def close(self) -> None:
        """Ends the processes that still run."""
        for process, log in self._running:
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, log):
                if stream is not None:
                    stream.close()
        self._running = []

    def _host(self, node: int) -> str:
        return "127.0.0.1" if self._bed is None else self._bed.address(node)

    def _start(self, node: int, order: dict[str, Any]) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "thinwire_lab.bench.child"]
        log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = subprocess.Popen(argv, **pipes) if self._bed is None else self._bed.popen(node, argv, **pipes)
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        self._running.append((process, log))
        return process

    def _result(self, process: subprocess.Popen[str], timeout_s: float) -> Any:
        began = time.monotonic()
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimedOutError(
                f"a worker of the benchmark did not end within {timeout_s:g} s: {self._tail(process)}"
            ) from None
        if process.returncode or not out.strip():
            raise WorkerError(
                f"a worker of the benchmark ended with exit code {process.returncode} "
                f"after {time.monotonic() - began:.0f} s: {self._tail(process)}"
            )
        return json.loads(out.splitlines()[-1])

    def _tail(self, process: subprocess.Popen[str]) -> str:
        log = next(log for p, log in self._running if p is process)
        log.seek(0)
        return log.read()[-2000:].strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
