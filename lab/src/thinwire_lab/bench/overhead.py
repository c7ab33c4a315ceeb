"""`thinwire bench overhead`: one worker in a real session, against a bare PyTorch loop.

Both sides run at once and alternate every fraction of a second: one is stopped while the other steps. Other load on a
shared machine, which changes speeds by a tenth from minute to minute, therefore affects both equally.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from thinwire.cluster.local import Local
from thinwire.errors import TimedOutError, WorkerError
from thinwire_lab.bench.bare import BATCH_SIZE, MODELS, ROWS
from thinwire_lab.bench.report import Report, Row, Say

TARGET = 0.97
TURN_STEPS = 12
LEAST_TURN_S = 0.25
WARM_UP_S = 2.0
START_S = 120.0
MOST_MARKS = 1 << 20
PAIRS = 10
"""Turns of each side before both restart: the memory layout of a process also affects its speed."""


def overhead(quick: bool, say: Say) -> Report:
    """Rows per second of both sides, by model and torch threads."""
    blocks = 1 if quick else 8
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    for threads in (1,) if quick else sorted({1, Local(workers=1).threads_each}):
        for model in MODELS:
            name = f"{model}, {threads} thread{'s' if threads > 1 else ''}"
            rates: list[tuple[float, float]] = []
            for block in range(blocks):
                say(f"{name}: {block + 1} of {blocks}, each with new processes")
                rates += _block(model, threads)
            ratios = [a / b for a, b in rates]
            medians = tuple(statistics.median(ratios[i : i + PAIRS]) for i in range(0, len(ratios), PAIRS))
            detail = " / ".join(f"{statistics.median(r):,.0f}" for r in zip(*rates, strict=True)) + " rows/s"
            rows.append(Row("one worker ÷ bare loop", name, statistics.median(ratios), TARGET, detail, medians))
            found.append({"model": model, "threads": threads, "rows_per_s": rates})
    return Report("overhead", rows, {"batch_size": BATCH_SIZE, "rows": ROWS, "cases": found})


def _block(model: str, threads: int) -> list[tuple[float, float]]:
    """Rows per second of thinwire and of the bare loop, turn by turn."""
    rates: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        bare, ours = (stack.enter_context(_Side(model, threads, session)) for session in (False, True))
        turn_s = max(LEAST_TURN_S, TURN_STEPS * max(ours.step_s, bare.step_s))
        for pair in range(PAIRS):
            if pair % 2:
                first = ours.turn(turn_s)
                rates.append((first, bare.turn(turn_s)))
            else:
                second = bare.turn(turn_s)
                rates.append((ours.turn(turn_s), second))
    return rates


class _Side:
    """One side of the comparison; stopped outside its turns."""

    def __init__(self, model: str, threads: int, session: bool) -> None:
        self._order = {"model": model, "threads": threads, "session": session}
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._pids: tuple[int, ...] = ()

    def __enter__(self) -> _Side:
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-bench-")
        path = os.path.join(self._folder.name, "marks")
        self._marks = np.memmap(path, dtype=np.float64, mode="w+", shape=(MOST_MARKS,))
        self._errors = open(os.path.join(self._folder.name, "errors"), "w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thinwire_lab.bench.bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=self._environment | {"TMPDIR": self._folder.name},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._order | {"marks": path}) + "\n")
        self._process.stdin.flush()
        try:
            self.step_s = self._warm_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in {*self._pids, self._process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()
        self._folder.cleanup()

    def _warm_up(self) -> float:
        """Lets the process start and warm up alone, then stops it; returns the seconds of one step."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_S
        said = self._process.stdout.readline()
        while not self._marks[0] and said:
            if time.monotonic() > deadline or self._process.poll() is not None:
                break
            time.sleep(0.05)
        if not self._marks[0]:
            self._errors.seek(0)
            kind = WorkerError if self._process.poll() is not None else TimedOutError
            raise kind(f"no step was made within {START_S:.0f} s: {self._errors.read()[-2000:]}")
        self._pids = tuple({int(said), self._process.pid})
        return BATCH_SIZE / self.turn(WARM_UP_S)

    def turn(self, seconds: float) -> float:
        """Rows per second during a turn of `seconds`, between the first and last time stamp: only whole steps count."""
        self._signal(signal.SIGCONT)
        before = int(self._marks[0])
        time.sleep(seconds)
        after = int(self._marks[0])
        self._signal(signal.SIGSTOP)
        marks = self._marks[before + 2 : after + 1]  # the first step began in an earlier turn
        return float(BATCH_SIZE * (len(marks) - 1) / (marks[-1] - marks[0]))

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)
