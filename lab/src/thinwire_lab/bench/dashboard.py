"""`thinwire bench dashboard`: the page of a run with a million events, in a real browser."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.errors import WorkerError
from thinwire_lab.bench.report import Report, Row, Say

WORKERS, EVENTS, TURNS = 64, 1_000_000, 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


def dashboard(quick: bool, say: Say) -> Report:
    """Seconds until the page is usable, seconds until it shows the whole run, and the server's memory."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return Report("dashboard", [], {}, ["all of it: pip install playwright"])
    if path is None:
        return Report("dashboard", [], {}, ["all of it: there is no Chromium here"])
    count = EVENTS // 10 if quick else EVENTS
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-dashboard-") as folder, sync_playwright() as playwright:
        say(f"writing {count:,} events of {WORKERS} workers")
        _write(Path(folder), count)
        for turn in range(1 if quick else TURNS):
            browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
            turns.append(_turn(folder, browser))
            browser.close()
            say(f"turn {turn + 1}: " + ", ".join(f"{k} {v:.3g}" for k, v in turns[-1].items()))
    rows = []
    for name, title, target, unit in (
        ("usable_s", "until a key moves the page's cursor, from the server's start", 2.0, "s"),
        ("complete_s", "until all of the run is shown, from the server's start", None, "s"),
        ("loads_s", "until all is shown when the server has read it", 2.0, "s"),
        ("memory_mb", "the server's memory", 300.0, "MB"),
    ):
        values = [turn[name] for turn in turns]
        spread = (min(values), max(values))
        rows.append(Row("page", title, statistics.median(values), target, spread=spread, at_most=True, unit=unit))
    return Report("dashboard", rows, {"events": count, "workers": WORKERS, "turns": turns})


def _turn(folder: str, browser: Any) -> dict[str, float]:
    argv = [sys.executable, "-m", "thinwire", "dashboard", folder]
    began = time.perf_counter()
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline().split()
        if len(said) < 2:
            raise WorkerError("the dashboard's server did not start")
        started, page = time.perf_counter(), browser.new_page()
        page.goto(said[1])
        page.locator("#lanes canvas").focus()
        page.keyboard.press("+")
        found = {"starts_s": started - began, "usable_s": time.perf_counter() - started}
        page.wait_for_selector("#state[data-state=ended]", timeout=120_000)
        found["complete_s"] = time.perf_counter() - started
        page.close()
        again, page = time.perf_counter(), browser.new_page()
        page.goto(said[1])
        page.wait_for_selector("#state[data-state=ended]", timeout=120_000)
        found["loads_s"] = time.perf_counter() - again
        page.close()
        status = Path(f"/proc/{server.pid}/status").read_text()
        most = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return found | {"memory_mb": int(most.split()[1]) / 1e3}
    finally:
        server.terminate()
        server.wait(10)


def _write(folder: Path, count: int) -> None:
    with open(folder / "events.jsonl", "w", encoding="utf-8") as file:
        for event in _events(count):
            file.write(json.dumps(event) + "\n")


def _events(count: int) -> Iterator[dict[str, Any]]:
    """A long run: reports of all workers every second, and every minute an evaluation and the loss of a worker."""
    began = 1_700_000_000.0
    start = {"strategy": "relay", "knobs": {}, "workers": WORKERS, "rows": 10**9, "validation_rows": 1000, "seed": 0}
    yield {"kind": "run_started", "time": began, **start, "resumed_from": None, "version": "bench"}
    attempts = dict.fromkeys(range(WORKERS), 0)
    for w in range(WORKERS):
        yield _joined(began, w, 0)
    for second in range(1, count // WORKERS):
        now = began + second
        if second % 60 == 0:
            w = second // 60 % WORKERS
            lost = {"worker": w, "attempt": attempts[w], "host": f"node-{w}", "reason": "killed", "steps": second}
            yield {"kind": "worker_lost", "time": now, **lost}
            attempts[w] += 1
            yield _joined(now, w, attempts[w])
            metrics = {"val_loss": 100 / second, "val_accuracy": 1 - 10 / second}
            seen = {"number": second // 60, "epoch": 1.0, "steps": second, "rows": second, "validation_rows": 9}
            yield {"kind": "evaluated", "time": now, **seen, "metrics": metrics, "best": True}
        for w in range(WORKERS):
            done = {"steps": second, "rows": 64 * second, "epoch": 0, "loss": 100 / second, "busy": 0.97}
            sent = {"gap_s": 0.01, "landed": second, "bytes_sent": 9 * second, "bytes_received": 9 * second}
            spent = {"stepped_s": 0.97 * second, "waited_s": 0.0, "exchanged_s": 0.5 * second}
            who = {"worker": w, "attempt": attempts[w]}
            yield {"kind": "progressed", "time": now + w / 200, **who, **done, **sent, **spent}
    yield {"kind": "run_ended", "time": began + count // WORKERS, "reason": "all rows done", "summary": {"rows": count}}


def _joined(now: float, worker: int, attempt: int) -> dict[str, Any]:
    who = {"worker": worker, "attempt": attempt, "host": f"node-{worker}", "pid": worker, "rows": 1000}
    return {"kind": "worker_joined", "time": now, **who, "again": attempt > 0}
