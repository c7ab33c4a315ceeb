"""`thinwire bench table`: the share of a link that a table uses, and the effect of more servers (SINGA's Fig. 10)."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from thinwire.exchange.joint import JointState
from thinwire.exchange.signals import Averaged, Formed, Landed
from thinwire.exchange.table.table import on_table
from thinwire.strategies import EASGD
from thinwire_lab.bench.processes import Processes
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.bench.worker_process import Place, join, leave, wait_for
from thinwire_lab.testbed import Testbed

SIZE = 25_000_000
WORKERS, RATE, BYTES_PER_S = 4, "1gbit", 125e6
TARGET = 0.8


def table_seconds(place: Place, *, size: int, servers: int, exchanges: int) -> dict[str, Any]:
    """Times exchanges of a whole vector of each worker, by all workers at once."""
    joint = JointState(EASGD(period=1, servers=servers), torch.zeros(size), place.workers)
    peer = join(place, joint, "float32", kind=on_table(workers=place.workers))
    peer.start("equal")
    formed = wait_for(peer, Formed)
    peer.put(formed.generation, None)
    values = torch.full((size,), float(place.worker + 1))
    times = []
    for number in range(exchanges + 1):
        peer.average(f"start:{number}", torch.zeros(1), 1.0, {})  # all workers begin together
        wait_for(peer, Averaged)
        began = time.perf_counter()
        round, fragment = peer.claim()
        peer.launch(round, fragment, values, 1.0, {})
        wait_for(peer, Landed)
        times.append(time.perf_counter() - began)
    peer.average("over", torch.zeros(1), 1.0, {})
    wait_for(peer, Averaged)
    leave(peer)
    return {"seconds": times[1:], "bytes": peer.bytes_sent}


def table(quick: bool, say: Say) -> Report:
    """Seconds of an exchange by numbers of workers and servers, at a gigabit."""
    why_not = Testbed.why_not()
    if why_not is not None:
        return Report("table", [], {}, [f"all of it: {why_not}"])
    rows: list[Row] = []
    measured: dict[str, Any] = {"size": SIZE, "rate": RATE, "cases": []}
    exchanges = 2 if quick else 6
    for workers in (WORKERS,) if quick else (2, 3, WORKERS):
        with Testbed(workers + 1, RATE) as bed:
            for servers in (1, workers) if quick else range(1, workers + 1):
                say(f"{workers} workers, {servers} servers at {RATE}")
                options = {"size": SIZE, "servers": servers, "exchanges": exchanges}
                results = Processes(bed, workers=workers).run("table_seconds", options)
                times = [max(each) for each in zip(*(r["seconds"] for r in results), strict=True)]
                measured["cases"].append({"workers": workers, "servers": servers, "seconds": times})
                rows.append(_row(workers, servers, times))
            if workers == WORKERS:
                say(f"{workers} workers, {workers} servers at {RATE}, unencrypted")
                options = {"size": SIZE, "servers": workers, "exchanges": exchanges}
                results = Processes(bed, workers=workers, plain=True).run("table_seconds", options)
                times = [max(each) for each in zip(*(r["seconds"] for r in results), strict=True)]
                measured["unencrypted"] = times
                rows.append(_row(workers, workers, times, ", unencrypted"))
    return Report("table", rows, measured)


def _row(workers: int, servers: int, times: list[float], how: str = "") -> Row:
    """Bytes that the busiest node sends in an exchange, relative to its link's capacity in that time.

    A worker sends its vector to the other servers. The busiest host also sends its share to each other worker.
    """
    share, size = 1 / servers, 4 * SIZE
    sent = size * (1 - share) + size * share * (workers - 1)
    used = [sent / seconds / BYTES_PER_S for seconds in times]
    target = TARGET if (workers, servers) == (WORKERS, WORKERS) else None
    name = f"{workers} workers, {servers} server{'s' if servers > 1 else ''}{how}"
    detail = f"{statistics.median(times):.2f} s an exchange"
    return Row("share of the link used", name, statistics.median(used), target, detail, tuple(used))
