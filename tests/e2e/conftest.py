"""A reader's shell: an empty folder, and the commands of the documentation."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.programs import Done, command_here

ROOT = Path(__file__).parents[2]
INSTALLING = re.compile(r"^(python3 -m venv |\. env/bin/activate|(env/bin/)?pip install )")
SERVING = re.compile(r"^thinwire dashboard ")


class Shell:
    """Runs blocks of commands in bash, in a folder of its own; `thinwire` and `python` are those of this tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, words in {"thinwire": "-m thinwire", "python": "", "python3": ""}.items():
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": source}

    def run(self, block: str, code: int = 0, timeout_s: float = 800.0) -> str:
        """The output of a block, which must end with the given exit code."""
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", block],
            cwd=self.folder,
            env=self.environment,
            text=True,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == code, done.stdout[-3000:]
        return done.stdout

    def follow(self, block: str, change: Callable[[str], str] = str) -> str:
        """Runs the commands of a page: skips installation, and stops servers after their first answer."""
        told = []
        for command in commands(block):
            if INSTALLING.match(command):
                continue
            told.append(self.serve(command) if SERVING.match(command) else self.run(change(command)))
        return "".join(told)

    def serve(self, command: str) -> str:
        """The page at the address that a command prints."""
        line = ["bash", "-c", f"exec {command}"]
        with subprocess.Popen(
            line, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as server:
            assert server.stdout is not None
            try:
                address = re.search(r"http://\S+", server.stdout.readline())
                assert address is not None
                with urllib.request.urlopen(address[0], timeout=300) as answer:
                    page: str = answer.read().decode()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    server.send_signal(signal.SIGINT)
            assert server.wait(300) == 0
        return page


def commands(block: str) -> list[str]:
    """Splits a block into commands; continued lines and here-documents belong to one command."""
    found: list[str] = []
    mark = ""
    for line in block.splitlines():
        if mark or (found and found[-1].endswith("\\")):
            found[-1] += f"\n{line}"
            mark = "" if line == mark else mark
        elif line.strip():
            found.append(line)
            begins = re.search(r"<<'(\w+)'", line)
            mark = begins[1] if begins else ""
    return found


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `thinwire` in this process; see `tests.programs.command_here`."""
    return functools.partial(command_here, capfd)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def split() -> Callable[[str], list[str]]:
    return commands
