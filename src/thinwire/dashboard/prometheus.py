"""A run's counters in the text form that Prometheus reads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from thinwire.dashboard.event_reducer import EventReducer

SILENT_S = 60.0
"""Without news, after which a run that has not ended counts as dead."""
RUN = (
    ("thinwire_run_active", "gauge", "1 while the run goes on"),
    ("thinwire_workers_live", "gauge", "workers that are stepping"),
    ("thinwire_workers_lost_total", "counter", "workers that were lost"),
    ("thinwire_rows_total", "counter", "rows trained on, by all workers"),
    ("thinwire_sent_bytes_total", "counter", "sent by all workers"),
    ("thinwire_received_bytes_total", "counter", "received by all workers"),
)
WORKER = (
    ("thinwire_worker_steps_total", "counter", "steps of a worker"),
    ("thinwire_worker_busy_ratio", "gauge", "share of its time that a worker spends stepping"),
    ("thinwire_worker_loss", "gauge", "training loss, as last heard"),
    ("thinwire_worker_last_seen_seconds", "gauge", "when it was last heard of, since 1970"),
)


def exposition(runs: Sequence[tuple[str, EventReducer, threading.Lock, float]]) -> str:
    """All runs' counters; the last of each run is for how many seconds there was no news of it.

    >>> story = EventReducer()
    >>> story.feed({"kind": "worker_joined", "time": 5.0, "worker": 0, "host": "a"})
    >>> text = exposition([("runs/a", story, threading.Lock(), 0.0)])
    >>> [line for line in text.splitlines() if line.startswith("thinwire_workers_live")]
    ['thinwire_workers_live{run="runs/a"} 1']
    """
    found: dict[str, list[str]] = {}
    for title, story, lock, quiet_s in runs:
        with lock:
            for name, labels, value in _samples(title, story, quiet_s):
                found.setdefault(name, []).append(f"{name}{{{labels}}} {value:.10g}")
    lines = []
    for name, kind, text in (*RUN, *WORKER, ("thinwire_metric", "gauge", "of the joint model, at the last evaluation")):
        if name in found:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *found[name]]
    return "\n".join(lines) + "\n"


def _samples(title: str, story: EventReducer, quiet_s: float) -> Iterable[tuple[str, str, float]]:
    run = f'run="{_escaped(title)}"'
    rows = story.workers.values()
    totals = (
        float(story.head.get("state") == "running" and quiet_s < SILENT_S),
        float(sum(row.state == "stepping" for row in rows)),
        float(sum(row.lost for row in rows)),
        float(sum(row.rows for row in rows)),
        float(sum(row.sent for row in rows)),
        float(sum(row.received for row in rows)),
    )
    for (name, _, _), value in zip(RUN, totals, strict=True):
        yield name, run, value
    for row in rows:
        where = f'{run},worker="{row.worker}",host="{_escaped(row.host)}"'
        values = (float(row.steps), row.busy, row.loss, row.seen)
        for (name, _, _), told in zip(WORKER, values, strict=True):
            if told is not None:
                yield name, where, told
    for metric, value in (story.head.get("metrics") or {}).items():
        yield "thinwire_metric", f'{run},name="{_escaped(metric)}"', float(value)


def _escaped(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
