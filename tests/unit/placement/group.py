"""A group of workers as processes of this machine, for tests of what they do together; as a script, what forks them.

Importing torch takes seconds: one process does that for all groups, and forks a member of one from then on.
"""

from __future__ import annotations

import atexit
import functools
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

import cloudpickle

from thinwire.placement import Crew

MEET_S = 600.0
"""How long members wait for each other: as long as a test may take."""


def write(file: IO[bytes], value: Any) -> None:
    data = cloudpickle.dumps(value)
    file.write(struct.pack("<q", len(data)) + data)
    file.flush()


def read(file: IO[bytes]) -> Any:
    head = file.read(8)
    return cloudpickle.loads(file.read(*struct.unpack("<q", head))) if head else None


class Launcher:
    """The process that forks members; it and they end with this one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        atexit.register(self.close)

    def ask(self, size: int, port: int, task: bytes) -> list[tuple[int, Any]]:
        """By member, its exit status and what it said, None where it said nothing."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        write(self.process.stdin, (size, port, task))
        found: list[tuple[int, Any]] = read(self.process.stdout)
        assert found, "the launcher died"
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@functools.cache
def launcher() -> Launcher:
    return Launcher()


def together(size: int, task: Callable[[Crew], Any]) -> list[Any]:
    """What each member of a group returns from a task; raises what any of them raised."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    try:
        said = launcher().ask(size, port, cloudpickle.dumps(task))
    except BaseException:  # such as a test's deadline: the next one gets a launcher of its own
        launcher().close()
        launcher.cache_clear()
        raise
    found = []
    failed = [f"member {part} of {size}:\n{answer[1]}" for part, (_, answer) in enumerate(said) if answer and answer[1]]
    assert not failed, "\n".join(failed)
    for part, (status, answer) in enumerate(said):
        assert answer is not None, f"member {part} of {size} ended with {status} and said nothing"
        found.append(answer[0])
    return found


def serve() -> None:
    """Forks a group for each order on stdin, until that ends."""
    import torch._dynamo  # noqa: F401 - what planning loads

    while (order := read(sys.stdin.buffer)) is not None:
        size, port, task = order
        members = []
        for part in range(size):
            here, there = os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, other in members:
                    other.close()
                os.close(here)
                take_part(part, size, port, task, os.fdopen(there, "wb"))
            os.close(there)
            members.append((pid, os.fdopen(here, "rb")))
        write(sys.stdout.buffer, answers(members))


def answers(members: list[tuple[int, IO[bytes]]]) -> list[tuple[int, Any]]:
    """What each member said, and how it ended; when one fails the others are not waited for."""
    found: dict[int, tuple[int, Any]] = {}
    with selectors.DefaultSelector() as heard:
        for part, (_, pipe) in enumerate(members):
            heard.register(pipe, selectors.EVENT_READ, part)
        while len(found) < len(members):
            for key, _ in heard.select():
                pid, pipe = members[key.data]
                answer = read(pipe)
                heard.unregister(pipe)
                pipe.close()
                if answer is None or answer[1] is not None:
                    for number, (other, _) in enumerate(members):
                        if number not in found and other != pid:
                            os.kill(other, signal.SIGKILL)
                found[key.data] = (os.waitpid(pid, 0)[1], answer)
    return [found[part] for part in range(len(members))]


def take_part(part: int, size: int, port: int, data: bytes, told: IO[bytes]) -> None:
    import torch

    value = error = None
    try:
        torch.set_num_threads(1)
        task = cloudpickle.loads(data)
        crew = Crew(part, size, port=port)
        crew.form(crew.address if part == 0 else f"127.0.0.1:{port}", "test", MEET_S)
        value = task(crew)
        crew.tell([0.0])  # nobody leaves before all are done
    except BaseException:
        error = traceback.format_exc()
    write(told, (value, error))
    told.close()
    if error is None:
        crew.disband()
    os._exit(0)


if __name__ == "__main__":
    serve()
