"""`kill -9` at any moment leaves only whole checkpoints listed, and never an older newest one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import thinwire.checkpoint
from thinwire.checkpoint import CheckpointStore

pytestmark = pytest.mark.processes
NUM_OPERATIONS = 90
"""Operations on files until a store holds its third checkpoint and has pruned the first, and some more."""


class Launcher:
    """The process that forks writers; see kill_loop.py."""

    def __init__(self) -> None:
        source = Path(thinwire.checkpoint.__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kill_loop.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        )

    def start(self, folder: Path, die_at: int = -1) -> int:
        assert self._process.stdin
        self._process.stdin.write(f"{folder} {die_at}\n".encode())
        word = b""
        while not word.endswith(b" "):
            word += self.read(1)
        return int(word.replace(b".", b""))

    def read(self, size: int) -> bytes:
        assert self._process.stdout
        data = self._process.stdout.read(size)
        assert data, "the launcher died"
        return data

    def wait_for_death(self) -> None:
        while not self.read(65_536).endswith(b"\n"):
            pass

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def check_all(folder: Path) -> int:
    """The newest step, after reading every part of every checkpoint listed."""
    store = CheckpointStore(folder)
    manifests = store.manifests()
    for manifest in manifests:
        assert [part.name for part in manifest.parts] == ["worker-0", "worker-1", "worker-2"]
        for worker, part in enumerate(manifest.parts):
            tree = store.read_part(manifest, part.name)
            assert isinstance(tree, dict)
            assert (tree["step"], tree["worker"]) == (manifest.step, worker)
            assert torch.equal(tree["weights"], torch.full((500,), float(manifest.step)))
    return manifests[-1].step if manifests else -1


def test_a_kill_at_a_random_moment_leaves_only_whole_checkpoints(launcher: Launcher, tmp_path: Path) -> None:
    moments = random.Random(7)
    newest = -1
    for _ in range(25):
        writer = launcher.start(tmp_path)
        for _ in range(moments.randrange(150)):
            launcher.read(1)
        os.kill(writer, signal.SIGKILL)
        launcher.wait_for_death()
        step = check_all(tmp_path)
        assert step >= newest
        newest = step
    assert newest > 10


def test_a_kill_before_any_operation_on_a_file_leaves_only_whole_checkpoints(
    launcher: Launcher, tmp_path: Path
) -> None:
    newest = []
    for die_at in range(NUM_OPERATIONS):
        folder = tmp_path / str(die_at)
        launcher.start(folder, die_at)
        launcher.wait_for_death()
        newest.append(check_all(folder))
    assert newest == sorted(newest)
    assert newest[-1] >= 3


def test_what_killed_writers_leave_is_pruned_once_a_newer_checkpoint_is_complete(
    launcher: Launcher, tmp_path: Path
) -> None:
    for die_at in range(40, NUM_OPERATIONS, 7):
        launcher.start(tmp_path, die_at)
        launcher.wait_for_death()
    store = CheckpointStore(tmp_path)
    step = check_all(tmp_path) + 1
    part = store.write_part(f"step-{step}", "worker-0", None)
    store.commit(thinwire.checkpoint.Manifest(f"step-{step}", step, (part,)))
    store.prune(keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted(f"step-{s}" for s in (step - 1, step))
