"""`thinwire doctor`: checks whether a cluster is ready for training."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from thinwire.cluster.frames import FrameData
from thinwire.cluster.preflight import Findings, examine
from thinwire.cluster.spark import Spark, SparkSite
from thinwire.errors import ConfigError


def doctor(options: argparse.Namespace) -> int:
    """Checks a cluster; the exit code says whether a run would work."""
    site = Spark(workers=options.workers, master=options.master).site(None)
    try:
        findings = examine(site.session, site.workers, site.host)
        if options.data:
            findings.deal(_rows(site, options.data))
    finally:
        site.session.stop()
    if options.json:
        print(json.dumps(dataclasses.asdict(findings)))
    else:
        _show(findings)
    return ConfigError.exit_code if findings.problems else 0


def _show(findings: Findings) -> None:
    console = Console()
    table = Table(box=SIMPLE, title=f"{len(findings.probes)} tasks probed, driver at {findings.driver}")
    rows = ["rows"] if findings.rows is not None else []
    for name in ("task", "host", "address", "python", "torch", "thinwire", "memory", "driver", "peers", *rows):
        table.add_column(name, justify="right" if name in ("task", "memory", "rows") else "left")
    for probe in sorted(findings.probes, key=lambda p: p.task):
        cut = [peer for peer, why in probe.peers.items() if why is not None]
        table.add_row(
            str(probe.task),
            probe.host,
            probe.address,
            probe.python,
            probe.packages["torch"] or "[red]none[/]",
            probe.packages["thinwire"] or "[red]none[/]",
            _gib(probe.memory_bytes),
            "ok" if probe.driver is None else "[red]cut[/]",
            f"{len(probe.peers)} ok" if not cut else f"[red]{len(cut)} cut[/]",
            *([] if findings.rows is None else [f"{findings.rows[probe.task]:,}"]),
        )
    console.print(table)
    for problem in findings.problems:
        console.print(f"[red]problem:[/] {problem}")
    for warning in findings.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    if not findings.problems:
        console.print(f"[green]ready[/] for {findings.workers} workers")


def _rows(site: SparkSite, data: str) -> list[int]:
    opened = site.open(data, None)
    if not isinstance(opened, FrameData):
        raise ConfigError(f"--data {data} is read by this machine, not by executors; name a folder of Parquet files")
    return opened.rows_dealt()


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / (1 << 30):.1f} GiB"
