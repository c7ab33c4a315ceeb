"""`thinwire bench overhead`: one worker through the real session, against a bare PyTorch loop."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.bench.bare import MODELS, Stopwatch, synthetic
from thinwire.bench.report import Report, Row, Say
from thinwire.cluster.local import Local
from thinwire.errors import WorkerError
from thinwire.session import fit

TARGET = 0.97
BATCH_SIZE = 64
ROWS = 20_480
RUN_S = 600.0


@dataclass(frozen=True)
class _Case:
    model: str
    threads: int
    warm_up: int
    steps: int


class _Rate(NamedTuple):
    rows_per_s: float
    rows_per_cpu_s: float
    """By the processor time of the whole worker process, which a busy machine does not stretch."""


def overhead(quick: bool, say: Say) -> Report:
    """Rows per second of both, by model and torch threads; ours and theirs run in turn."""
    repeats, seconds, least, warm_up = (1, 0.3, 20, 10) if quick else (15, 2.0, 60, 30)
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    for threads in (1,) if quick else sorted({1, Local(workers=1).threads_each}):
        for model in MODELS:
            rate = _theirs(_Case(model, threads, warm_up, warm_up + least)).rows_per_s
            case = _Case(model, threads, warm_up, warm_up + max(least, int(seconds * rate / BATCH_SIZE)))
            ours: list[_Rate] = []
            theirs: list[_Rate] = []
            for repeat in range(repeats):
                say(f"{model}, {threads} threads: {repeat + 1} of {repeats}, {case.steps} steps each")
                # The one that comes first changes from time to time, so that a drift of the machine favours nobody.
                for own in (True, False) if repeat % 2 else (False, True):
                    (ours if own else theirs).append(_ours(case) if own else _theirs(case))
            name = f"{model}, {threads} thread{'s' if threads > 1 else ''}"
            for label, kind in (("per second", "rows_per_s"), ("per second of processor time", "rows_per_cpu_s")):
                a, b = [getattr(r, kind) for r in ours], [getattr(r, kind) for r in theirs]
                ratios = tuple(x / y for x, y in zip(a, b, strict=True))
                detail = f"{statistics.median(a):,.0f} / {statistics.median(b):,.0f} rows"
                title = f"one worker ÷ bare loop, rows {label}"
                rows.append(Row(title, name, statistics.median(ratios), TARGET, detail, ratios))
            case_of = {"model": model, "threads": threads}
            found.append(case_of | {"ours": [r._asdict() for r in ours], "bare": [r._asdict() for r in theirs]})
    return Report("overhead", rows, {"batch_size": BATCH_SIZE, "rows": ROWS, "cases": found})


def _ours(case: _Case) -> _Rate:
    x, y = synthetic(ROWS)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        path = os.path.join(folder, "ours.json")
        fit(
            MODELS[case.model],
            {"pixels": x, "label": y},
            optimizer=Stopwatch(path, case.warm_up, case.steps),
            cluster=Local(workers=1, threads=case.threads),
            steps=case.steps,
            batch_size=BATCH_SIZE,
            progress=False,
        )
        return _rate(path)


def _theirs(case: _Case) -> _Rate:
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        path = os.path.join(folder, "bare.json")
        order = {"model": case.model, "rows": ROWS, "batch_size": BATCH_SIZE, "steps": case.steps}
        order |= {"threads": case.threads, "stopwatch": [path, case.warm_up, case.steps]}
        threads = str(case.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-m", "thinwire.bench.bare"],
            input=json.dumps(order) + "\n",
            capture_output=True,
            text=True,
            env=environment,
            timeout=RUN_S,
        )
        if done.returncode:
            raise WorkerError(f"the bare loop failed: {done.stderr[-2000:]}")
        return _rate(path)


def _rate(path: str) -> _Rate:
    with open(path) as file:
        measured = json.load(file)
    rows = float(measured["steps"]) * BATCH_SIZE
    return _Rate(rows / float(measured["seconds"]), rows / float(measured["cpu_seconds"]))
