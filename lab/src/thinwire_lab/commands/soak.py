"""`thinwire testbed soak`: a long run whose workers are killed repeatedly, and the resources of its processes."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.errors import ConfigError, WorkerError, nearest
from thinwire.strategies import STRATEGIES
from thinwire_lab.bench.report import about
from thinwire_lab.soak import Order, Soaked, judge, run
from thinwire_lab.soak.order import PLACES
from thinwire_lab.sparkbed import SparkBed


def soak(options: argparse.Namespace) -> int:
    """Runs a soak test; fails if a resource grew, or rows are missing."""
    for flag, given, known in (
        ("--arena", options.arena, PLACES),
        ("--strategy", options.strategy, tuple(STRATEGIES)),
        ("--exchange", options.exchange, ("auto", "mesh", "spark")),
    ):
        if given not in known:
            raise ConfigError(f"{flag} {given!r} is not known. {nearest(given, known)}")
    if options.minutes <= 0 or options.every <= 0:
        raise ConfigError(
            f"--minutes {options.minutes:g} with --every {options.every:g} is not possible; give numbers above 0: the "
            "length of the run, and the seconds between two deaths"
        )
    why_not = SparkBed.why_not() if options.arena == "bed" else None
    if why_not is not None:
        raise ConfigError(f"--arena bed cannot run here: {why_not}; use --arena spark or local")
    order = Order(
        minutes=options.minutes,
        every_s=options.every,
        quiet_s=min(60.0, 20.0 * options.minutes),
        place=options.arena,
        strategy=options.strategy,
        exchange=options.exchange,
        look_s=min(15.0, 4.0 * options.minutes),
    )
    if options.out:
        os.makedirs(options.out, exist_ok=True)
    columns = TextColumn("soak"), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("soak", total=order.seconds, told="")

        def say(look: dict[str, Any]) -> None:
            told = f"{look['deaths']} deaths, driver {look['driver memory_mb']:.0f} MB"
            bar.update(task, completed=look["at_s"], told=told)
            if options.out:  # keeps the measurements of a run that is stopped early
                with open(os.path.join(options.out, "looks.jsonl"), "a") as file:
                    file.write(json.dumps(look) + "\n")

        found = run(order, say)
    soaked = judge(found)
    if options.out:
        with open(os.path.join(options.out, "soak.json"), "w") as file:
            words = f"thinwire testbed soak --minutes {options.minutes:g} --arena {options.arena}"
            json.dump({"name": "soak", **about(words)} | soaked.to_json() | found, file)
    if options.json:
        print(json.dumps(soaked.to_json()))
    else:
        _show(soaked)
    if soaked.wrong:
        raise WorkerError(f"a soak of {options.minutes:g} minutes: {'; '.join(soaked.wrong)}")
    return 0


def _show(soaked: Soaked) -> None:
    table = Table(title=f"{soaked.deaths} deaths in {soaked.minutes:g} minutes", box=box.ROUNDED)
    for name in ("", "early", "late", "allowed"):
        table.add_column(name, justify="left" if not name else "right")
    for name, each in soaked.gauges.items():
        late = f"{each.late:,.1f}" if each.flat else f"[red]{each.late:,.1f}[/]"
        table.add_row(name.replace("_mb", ", MB").replace("_", " "), f"{each.early:,.1f}", late, f"+ {each.allowed:g}")
    console = Console()
    console.print(table)
    console.print(f"of the rows a second before, {soaked.goodput:.1%} were kept", highlight=False)
