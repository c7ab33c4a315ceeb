"""Event logs to look at: as long and as eventful as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


def events(workers: int, seconds: int, *, lost: int | None = None, ends: bool = True) -> Iterator[dict[str, Any]]:
    """A run of so many workers that report once a second; one of them is lost half way and comes back."""
    yield {"kind": "run_started", "time": BEGAN, "strategy": "relay", "knobs": {"bits": "auto"}, "workers": workers,
           "rows": 1000, "validation_rows": 100, "seed": 0, "resumed_from": None, "version": "0"}  # fmt: skip
    for worker in range(workers):
        yield {"kind": "worker_joined", "time": BEGAN, "worker": worker, "attempt": 0, "host": f"node-{worker}",
               "pid": 1, "rows": 500, "again": False}  # fmt: skip
    yield {"kind": "generation_formed", "time": BEGAN, "generation": 1, "members": list(range(workers)),
           "reference": 0, "landed": 0}  # fmt: skip
    half, attempt = seconds // 2, dict.fromkeys(range(workers), 0)
    since = dict.fromkeys(range(workers), 0)
    for second in range(1, seconds + 1):
        now = BEGAN + second
        if lost is not None and second == half:
            yield {"kind": "worker_lost", "time": now, "worker": lost, "attempt": 0, "host": f"node-{lost}",
                   "reason": "killed", "steps": 10 * second}  # fmt: skip
            yield {"kind": "worker_joined", "time": now + 0.5, "worker": lost, "attempt": 1, "host": "node-new",
                   "pid": 2, "rows": 500, "again": True}  # fmt: skip
            attempt[lost], since[lost] = 1, second
        for worker in range(workers):
            alive = second - since[worker]
            yield {"kind": "progressed", "time": now + worker / (2 * workers), "worker": worker,
                   "attempt": attempt[worker], "steps": 10 * second, "rows": 640 * second, "epoch": 0,
                   "loss": 2.0 / (1 + second / 50), "busy": 0.95, "gap_s": 0.02, "landed": 10 * second,
                   "bytes_sent": 1000 * alive, "bytes_received": 2000 * alive, "stepped_s": 0.9 * alive,
                   "waited_s": 0.0, "exchanged_s": 0.5 * alive}  # fmt: skip
        if second % 10 == 0:
            yield {"kind": "round_landed", "time": now, "round": 10 * second, "steps": 10 * second, "fragments": 4,
                   "codec": "int4", "seconds": 0.05, "size_bytes": 100, "contributors": [0],
                   "fragment": second // 10 % 4, "late": 1, "period": 4}  # fmt: skip
            yield {"kind": "evaluated", "time": now, "number": second // 10, "epoch": 1.0, "steps": 10 * second,
                   "rows": 640 * second, "metrics": {"val_loss": 1.0, "val_accuracy": min(0.98, second / 100)},
                   "validation_rows": 100, "best": True}  # fmt: skip
    if ends:
        yield {"kind": "run_ended", "time": BEGAN + seconds + 1, "reason": "all rows done", "summary": {"rows": 1}}


def write(folder: Path, told: Iterator[dict[str, Any]]) -> Path:
    """Writes them as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.jsonl", "w", encoding="utf-8") as file:
        for event in told:
            file.write(json.dumps(event) + "\n")
    return folder
