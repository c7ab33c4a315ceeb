"""`thinwire testbed chaos`: injects faults into the processes and links of real runs."""

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
    """Runs trials until the time is up; fails if a trial fails."""
    strategies = _among(options.strategies, known_strategies(), "--strategies")
    arenas = _among(options.arenas, tuple(ARENAS), "--arenas")
    placements = _among(options.placements, PLACEMENTS, "--placements") if options.placements else ()
    if options.minutes <= 0 or options.deeds < 1 or (options.kills is not None and options.kills < 1):
        raise ConfigError("--minutes, --kills and --deeds are not possible below 1; give larger values")
    for arena, why_not in (("bed", SparkBed.why_not), ("host", Host.why_not)):
        if arena in arenas and (why := why_not()) is not None:
            raise ConfigError(f"--arenas {arena} cannot run here: {why}; leave it out")
    out = options.out or tempfile.mkdtemp(prefix="thinwire-chaos-")
    os.makedirs(out, exist_ok=True)
    console = Console(stderr=True)
    words = f"thinwire testbed chaos --seed {options.seed} --deeds {options.deeds} --arenas {','.join(arenas)}"
    given = (options.seed, arenas, strategies, options.minutes, out, options.kills, options.deeds, placements)
    campaign = Campaign(*given, about=about(words))

    def told(report: Report) -> None:
        state = f"[red]{report.wrong[0]}[/]" if report.wrong else f"{report.rows:,} rows, all of them"
        console.print(
            f"{report.strategy}, {report.placement} ({report.arena}): {len(report.deeds)} deeds, {report.kills} kills, "
            f"{report.lost} lost, {report.resumed} resumed, {report.seconds:.0f} s: {state}",
            highlight=False,
        )

    reports = campaign.play(told)
    if options.json:
        print(json.dumps(campaign.totals() | {"report": os.path.join(out, "chaos.json")}))
    else:
        _show(campaign, out)
    raise_if_wrong(reports)
    return 0


def _show(campaign: Campaign, out: str) -> None:
    table = Table(show_header=False, box=box.ROUNDED)
    for name, value in campaign.totals().items():
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
