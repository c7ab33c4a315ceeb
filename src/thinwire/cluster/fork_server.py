"""A process that imports everything once and forks workers.

Importing torch takes seconds in each process, most of a short run's time. A fork takes milliseconds, so that a lost
worker is replaced quickly. One fork server serves all runs of a driver. No process survives the one that needs it:

1. the driver ends: its end of the request pipe closes, and the fork server kills its workers and exits;
2. the fork server ends: the pipe that only it holds open closes, and each worker exits;
3. a worker ends: the fork server reaps it and tells the driver its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from thinwire import logs

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from thinwire.cluster.fork_server import main; main()"
)
WARM_CODECS = ("int4", "sign2", "sign1")
"""Codecs compiled once here, so that no worker has to compile them."""
PRELOADED = ("torch", "torch._dynamo", "numpy.random", "zmq.auth.thread", "pyarrow", "cloudpickle", "thinwire.run.job")
"""Modules that every worker needs. torch's optimizers import torch._dynamo, which alone takes two seconds."""


class ForkServer:
    """The driver's side: starts the fork server, asks for workers, and learns which have ended."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(requests), str(replies), json.dumps(sys.path)],
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the driver alone, which asks the workers to save and stop
        )
        os.close(requests)
        os.close(replies)
        os.set_blocking(self._replies, False)
        self._buffer = b""
        self._token = 0
        self._lock = threading.Lock()
        self.pids: dict[int, int] = {}
        self.endings: dict[int, int] = {}
        """Exit codes of workers that have ended, by token; negative for signals."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, payload: bytes, worker: int, attempt: int, threads: int, log: str) -> int:
        """Asks for a worker; returns the token under which its end is reported. Its code travels through the pipe."""
        with self._lock:
            self._token += 1
            request = {
                "token": self._token,
                "worker": worker,
                "attempt": attempt,
                "threads": threads,
                "log": log,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "path": sys.path,
                "size": len(payload),
            }
            _write(self._requests, json.dumps(request).encode() + b"\n" + payload)
            return self._token

    def kill(self, token: int) -> None:
        """Ends one worker at once."""
        self.poll()
        if token in self.pids and token not in self.endings:
            with _ignoring(ProcessLookupError):
                os.kill(self.pids[token], signal.SIGKILL)

    def poll(self) -> None:
        """Reads what the fork server has reported."""
        while select.select([self._replies], [], [], 0)[0]:
            data = os.read(self._replies, 65536)
            if not data:
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "pid" in told:
                self.pids[told["token"]] = told["pid"]
            else:
                self.endings[told["token"]] = told["code"]

    def close(self) -> None:
        """Ends the fork server and the workers that still run."""
        os.close(self._requests)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._replies)


class _ignoring:  # noqa: N801 - named like contextlib.suppress
    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        return isinstance(value, self._kind)


_shared: ForkServer | None = None


def shared() -> ForkServer:
    """The driver's fork server, started when first needed, and again if it has died."""
    global _shared
    if _shared is None or not _shared.alive:
        if _shared is None:
            atexit.register(_close_shared)
        _shared = ForkServer()
    return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# -- the process ------------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._children: dict[int, int] = {}
        self._alive, self._held = os.pipe()
        self._ended, self._rang = os.pipe()
        os.set_blocking(self._rang, False)
        signal.signal(signal.SIGCHLD, lambda *_: _ring(self._rang))

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._reap()
            if self._requests in ready and not self._take():
                break
        for pid in self._children:
            with _ignoring(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _take(self) -> bool:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._requests, 1)
            if not byte:
                return False
            line += byte
        request = json.loads(line)
        payload = bytearray()
        while len(payload) < request["size"]:
            data = os.read(self._requests, min(1 << 20, request["size"] - len(payload)))
            if not data:
                return False
            payload += data
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, bytes(payload))
        self._children[pid] = request["token"]
        self._tell({"token": request["token"], "pid": pid})
        return True

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._tell({"token": self._children.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, reply: dict[str, Any]) -> None:
        _write(self._replies, json.dumps(reply).encode() + b"\n")

    def _become_worker(self, request: dict[str, Any], payload: bytes) -> None:
        """Runs the worker in the forked process; never returns."""
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._requests, self._replies, self._held, self._ended, self._rang):
                os.close(descriptor)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            outside = os.dup(2)
            os.dup2(log, 2)
            os.setsid()
            threading.Thread(target=_leave_with, args=(self._alive,), daemon=True).start()
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["folder"])
            sys.path[:] = request["path"]
            logs.outside = os.fdopen(outside, "w", buffering=1)
            _work(payload, request["worker"], request["attempt"], request["threads"])
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # threads and exit handlers of user libraries must not delay the exit


def _work(payload: bytes, worker: int, attempt: int, threads: int) -> None:
    import cloudpickle
    import torch

    from thinwire.cluster.process import make_own

    make_own(threads)
    torch.set_num_interop_threads(1)
    cloudpickle.loads(payload)(worker, attempt, first=attempt == 0)  # trusted: comes from the driver's own pipe


def _leave_with(alive: int) -> None:
    os.read(alive, 1)
    os._exit(3)


def _ring(descriptor: int) -> None:
    with _ignoring(BlockingIOError):
        os.write(descriptor, b"!")


def main() -> None:
    """Imports the modules that workers need, then serves."""
    import importlib

    # Arrow's other allocators start a thread, which a fork would lose
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)  # the forks would lack a pool of threads that is made here
    from thinwire.rules.compression import codec, warm_up

    for name in WARM_CODECS:
        warm_up(codec(name))
    _Server(int(sys.argv[1]), int(sys.argv[2])).serve()
