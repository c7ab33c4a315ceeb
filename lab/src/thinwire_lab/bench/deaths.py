"""`thinwire bench deaths`: rows that count while a worker is killed every minute, relative to those before."""

from __future__ import annotations

import dataclasses
from typing import Any

from thinwire.errors import WorkerError
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.soak import Order, judge, run
from thinwire_lab.sparkbed import SparkBed

TARGET = 0.95
KINDS = {"its process": 0, "its executor": 1}
"""What is killed, and the period of executors among the kills; 0 for none."""


def deaths(quick: bool, say: Say) -> Report:
    """Four workers under `Relay` on a Spark testbed, killed in turn."""
    why_not = SparkBed.why_not()
    if why_not is not None:
        return Report("deaths", [], {}, [f"all of it: {why_not}"])
    minutes, quiet_s = (2.0, 30.0) if quick else (8.0, 120.0)
    rows, measured = [], {}
    for what, executors in KINDS.items():
        order = Order(minutes=minutes, quiet_s=quiet_s, spare=0, executors=executors)
        say(f"a worker loses {what} every minute, for {minutes:g} minutes")
        found = run(order, lambda look: say(f"{look['at_s']:.0f} s, {look['deaths']} deaths"))
        soaked = judge(found)
        if not soaked.complete:
            raise WorkerError(f"not all rows were trained on: {soaked.summary['reason']}")
        detail = (
            f"{soaked.deaths} deaths, {soaked.summary['workers_lost']} lost, {soaked.summary['rows']:,} rows in all"
        )
        part = f"a worker loses {what} every minute"
        rows.append(Row(part, "rows a second that count, against before", soaked.goodput, TARGET, detail))
        measured[what] = _kept(found) | {"order": dataclasses.asdict(order)}
    return Report("deaths", rows, measured)


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("deaths", "rows", "summary")}
