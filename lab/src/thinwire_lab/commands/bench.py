"""`thinwire bench`: runs a benchmark, and prints its result as a table or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.cli.extras import Command
from thinwire.errors import ThinwireError
from thinwire_lab import bench as benches
from thinwire_lab.bench.report import Report, Row, save

SUITE = "suite"
PRIORITY = -15
"""Added niceness, where it is allowed: reduces the effect of other programs on measurements."""


FIGURES = "benchmarks/figures"
"""Folder of a checkout with scripts that draw figures from results."""
DRAWN = {"placement": "partitions", "table": "servers", "comparison": "comparison"}
"""By benchmark, the script that draws its result."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `thinwire bench`."""
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(benches.BENCHES)}, or suite: all of them")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, as the last line")
    parser.add_argument("--quick", action="store_true", help="a shorter run with noisier numbers")
    parser.add_argument("--save", metavar="DIR", help="write the result with date and machine into that folder")


def bench(options: argparse.Namespace) -> int:
    """Runs one benchmark or all of them; returns the exit code."""
    console = Console(stderr=True)
    with contextlib.suppress(OSError):
        os.nice(PRIORITY)  # both sides of every comparison inherit it
    names = list(benches.BENCHES) if options.name == SUITE else [options.name]
    failed = 0
    for name in names:
        try:
            _one(name, options, console)
        except ThinwireError as error:
            if options.name != SUITE:
                raise
            failed += 1  # continue with the other benchmarks
            console.print(f"[red]bench {name}:[/] {error}", highlight=False)
    if options.name == SUITE and options.save:
        _draw(options.save, console)
    return 1 if failed else 0


def _one(name: str, options: argparse.Namespace, console: Console) -> None:
    with console.status(f"bench {name}") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False)

        report = benches.run(name, quick=options.quick, say=say)
    words = ["thinwire", "bench", name, *(["--quick"] if options.quick else [])]
    result = report.to_json(shlex.join(words))
    if options.save:
        console.print(f"wrote {save(result, options.save)}", highlight=False)
    if options.json:
        print(json.dumps(result))
    else:
        _show(report)


def _draw(folder: str, console: Console) -> None:
    """Draws the figures again, in a checkout whose results were written."""
    if os.path.realpath(folder) != os.path.realpath("benchmarks/results") or not os.path.isdir(FIGURES):
        console.print("figures are drawn with --save benchmarks/results in a checkout", highlight=False)
        return
    for name, script in DRAWN.items():
        picture = f"docs/images/{name if name != 'table' else 'servers'}.svg"
        done = subprocess.run([sys.executable, f"{FIGURES}/{script}.py", picture], capture_output=True, text=True)
        told = f"drew {picture}" if not done.returncode else f"{picture}: {done.stderr.strip()[-300:]}"
        console.print(told, highlight=False)


def _show(report: Report) -> None:
    table = Table(box=box.ROUNDED, title=f"bench {report.name}")
    for heading in ("", "", "value", "spread", "target", "detail"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    part = None
    for row in report.rows:
        if part not in (None, row.part):
            table.add_section()
        table.add_row("" if row.part == part else row.part, row.name, *_cells(row), row.detail)
        part = row.part
    console = Console()
    console.print(table)
    for line in report.skipped:
        console.print(f"skipped: {line}", highlight=False)


def _cells(row: Row) -> tuple[str, str, str]:
    value = "" if row.value is None else f"{row.value:.3f}{row.unit and ' ' + row.unit}"
    if row.met is not None:
        value = f"[{'green' if row.met else 'red'}]{value}[/]"
    spread = f"{min(row.spread):.3f} … {max(row.spread):.3f}" if len(row.spread) > 1 else ""
    if len(row.spread) > 4:
        low, _, high = statistics.quantiles(row.spread, n=4)
        spread = f"{low:.3f} … {high:.3f}"
    target = "" if row.target is None else f"{'≤' if row.at_most else '≥'} {row.target:g}"
    return value, spread, target


COMMAND = Command(add_options, bench)
