"""`thinwire testbed chaos`: real runs, and what is done to their processes and links on purpose."""

from __future__ import annotations

import argparse
import json
import os
import tempfile

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.errors import ConfigError, nearest
from thinwire_lab.bench.report import about
from thinwire_lab.chaos import ARENAS, Report
from thinwire_lab.chaos.campaign import PLACEMENTS, Campaign, known_strategies
from thinwire_lab.chaos.host import Host
from thinwire_lab.chaos.trial import raise_if_wrong
from thinwire_lab.sparkbed import SparkBed


def chaos(options: argparse.Namespace) -> int:
    """Plays bouts until the time is up; fails where one went wrong."""
    strategies = _among(options.strategies, known_strategies(), "--strategies")
    arenas = _among(options.arenas, tuple(ARENAS), "--arenas")
    placements = _among(options.placements, PLACEMENTS, "--placements") if options.placements else ()
    if options.minutes <= 0 or options.deeds < 1 or (options.kills is not None and options.kills < 1):
        raise ConfigError("--minutes, --kills and --deeds are not possible below 1; give how long, or how many")
    for arena, why_not in (("bed", SparkBed.why_not), ("host", Host.why_not)):
        if arena in arenas and (why := why_not()) is not None:
            raise ConfigError(f"--arenas {arena} cannot be had here: {why}; leave it out")
    out = options.out or tempfile.mkdtemp(prefix="thinwire-chaos-")
    os.makedirs(out, exist_ok=True)
    console = Console(stderr=True)
    words = f"thinwire testbed chaos --seed {options.seed} --deeds {options.deeds} --arenas {','.join(arenas)}"
    given = (options.seed, arenas, strategies, options.minutes, out, options.kills, options.deeds, placements)
    season = Campaign(*given, about=about(words))

    def told(report: Report) -> None:
        state = f"[red]{report.wrong[0]}[/]" if report.wrong else f"{report.rows:,} rows, as many as there are"
        console.print(
            f"{report.strategy}, {report.placement} ({report.arena}): {len(report.deeds)} deeds, {report.kills} kills, "
            f"{report.lost} lost, {report.resumed} resumed, {report.seconds:.0f} s: {state}",
            highlight=False,
        )

    reports = season.play(told)
    if options.json:
        print(json.dumps(season.totals() | {"report": os.path.join(out, "chaos.json")}))
    else:
        _show(season, out)
    raise_if_wrong(reports)
    return 0


def _show(season: Campaign, out: str) -> None:
    table = Table(show_header=False, box=box.ROUNDED)
    for name, value in season.totals().items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    console = Console()
    console.print(table)
    console.print(f"what was done, and when: {os.path.join(out, 'chaos.json')}", highlight=False)


def _among(text: str | None, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    found = known if text is None else tuple(word.strip() for word in text.split(","))
    for word in found:
        if word not in known:
            raise ConfigError(f"{flag} names {word!r}, which is not known. {nearest(word, known)}")
    return found
