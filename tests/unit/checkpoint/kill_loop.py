"""Writes checkpoints until killed; run by test_kill.py, never imported.

Torch takes seconds to import, so one launcher imports it and forks a writer for each line on its stdin,
`FOLDER DIE_AT`. It answers with the writer's pid, then a dot before every operation on a file, then, when the
writer has died, a newline. A writer kills itself at the operation numbered DIE_AT, unless that is negative.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from thinwire.checkpoint import CheckpointStore, Manifest

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def tree(step: int, worker: int) -> dict[str, object]:
    return {"step": step, "worker": worker, "weights": torch.full((500,), float(step))}


def write(folder: str) -> None:
    store = CheckpointStore(folder)
    latest = store.latest()
    step = latest.step + 1 if latest else 0
    while True:
        name = f"step-{step}"
        parts = tuple(store.write_part(name, f"worker-{i}", tree(step, i)) for i in range(3))
        store.commit(Manifest(name, step, parts, {"loss": float("nan")}))
        store.prune(keep=2)
        step += 1


def announce_and_die(die_at: int) -> None:
    seen = 0

    def hook(event: str, _arguments: object) -> None:
        nonlocal seen
        if event in OPERATIONS:
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(1, b".")
            seen += 1

    sys.addaudithook(hook)


def main() -> None:
    torch.set_num_threads(1)
    CheckpointStore("memory://warm").write_part("a", "b", tree(0, 0))  # imports what is imported late
    for line in sys.stdin:
        folder, die_at = line.split()
        pid = os.fork()
        if pid == 0:
            announce_and_die(int(die_at))
            write(folder)
        os.write(1, f"{pid} ".encode())
        os.waitpid(pid, 0)
        os.write(1, b"\n")


if __name__ == "__main__":
    main()
