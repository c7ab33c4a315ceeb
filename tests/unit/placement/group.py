"""A group of workers as processes of this machine, for tests of what they do together; as a script, one of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from thinwire.placement import Crew

MEET_S = 60.0


def together(size: int, task: Callable[[Crew], Any], timeout_s: float = 100.0) -> list[Any]:
    """What each member of a group returns from a task; raises what any of them raised."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    members = []
    for part in range(size):
        member = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        members.append(member)
        assert member.stdin is not None
        member.stdin.write(cloudpickle.dumps((part, size, port, task)))
        member.stdin.close()
    deadline = time.monotonic() + timeout_s
    try:
        found = []
        for part, member in enumerate(members):
            assert member.stdout is not None
            said = member.stdout.read()
            member.wait(max(1.0, deadline - time.monotonic()))
            assert said, f"member {part} of {size} ended with {member.returncode} and said nothing"
            value, error = cloudpickle.loads(said)
            assert error is None, f"member {part} of {size} failed:\n{error}"
            found.append(value)
        return found
    finally:
        for member in members:
            if member.poll() is None:
                member.kill()
            member.wait()
            assert member.stdout is not None
            member.stdout.close()


def take_part() -> None:
    import torch

    part, size, port, task = cloudpickle.loads(sys.stdin.buffer.read())
    torch.set_num_threads(1)
    crew = Crew(part, size, port=port)
    value = error = None
    try:
        crew.form(crew.address if part == 0 else f"127.0.0.1:{port}", "test", MEET_S)
        value = task(crew)
        crew.tell([0.0])  # nobody leaves before all are done
    except BaseException:
        error = traceback.format_exc()
    sys.stdout.buffer.write(cloudpickle.dumps((value, error)))
    sys.stdout.buffer.flush()
    crew.disband()
    os._exit(0)


if __name__ == "__main__":
    take_part()
