"""`thinwire testbed schedules`: runs the protocol in virtual time, with faults drawn from seeds."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.errors import ConfigError, WorkerError, nearest
from thinwire_lab.bench.report import about
from thinwire_lab.schedules import Schedule, play, record
from thinwire_lab.schedules.draw import JOINT, MENU
from thinwire_lab.schedules.many import MOST_SHOWN, Tally, play_all


def schedules(options: argparse.Namespace) -> int:
    """Runs schedules; prints the events of a single seed as they happen."""
    if options.strategy is not None and options.strategy not in MENU | JOINT:
        raise ConfigError(
            f"--strategy {options.strategy!r} is not on the menu. {nearest(options.strategy, MENU | JOINT)}"
        )
    seeds = _seeds(options.seeds)
    console = Console(stderr=True)
    if options.record:
        record.check(options.record, seeds)
    elif len(seeds) == 1 and not options.json and not options.digests:
        return _tell(Schedule.draw(seeds[0], options.strategy))
    bar = Progress(
        TextColumn("schedules"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}"),
        console=console,
    )
    with bar:
        task = bar.add_task("schedules", total=len(seeds), bad="")

        def told(tally: Tally) -> None:
            bar.update(task, completed=tally.played, bad=f"{len(tally.failed)} failed" if tally.failed else "")

        tally = play_all(seeds, options.jobs or os.cpu_count() or 1, options.strategy, told)
    _show(tally, as_json=options.json)
    if options.record:
        words = f"thinwire testbed schedules --record {os.path.basename(options.record)}"
        kept = record.add(options.record, seeds, tally.to_json(), about(words))
        console.print(f"{options.record} has {kept['played']:,} now", highlight=False)
    if options.digests:
        _compare(Path(options.digests), tally.digests, console)
    if tally.failed:
        raise WorkerError(
            f"{len(tally.failed)} of {tally.played} schedules broke an invariant; run the first one again with\n  "
            f"{tally.failed[0].replay}"
        )
    return 0


def _compare(file: Path, digests: dict[int, str], console: Console) -> None:
    """Compares the digests of events with those of another tree; adds seeds that the file lacks."""
    before: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    differ = sorted(seed for seed, digest in digests.items() if before.get(str(seed), digest) != digest)
    if differ:
        shown = " ".join(map(str, differ[:MOST_SHOWN]))
        raise WorkerError(f"{len(differ)} of {len(digests)} schedules have other events than in {file}: {shown}")
    known = sum(str(seed) in before for seed in digests)
    merged = before | {str(seed): digest for seed, digest in digests.items()}
    file.write_text(json.dumps(dict(sorted(merged.items(), key=lambda pair: int(pair[0]))), indent=0) + "\n")
    console.print(f"{known:,} schedules have the events that {file} has; {len(digests) - known:,} are new in it")


def _show(tally: Tally, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tally.to_json()))
        return
    table = Table(title=f"{tally.played:,} schedules in {tally.seconds:.0f} s", show_header=False, box=box.ROUNDED)
    for what, count in tally.outcomes.most_common():
        table.add_row(what, f"{count:,}")
    table.add_row("workers lost on the way", f"{tally.lost:,}")
    table.add_row("hours of virtual time", f"{tally.virtual_s / 3600:.1f}")
    Console().print(table)
    for verdict in tally.failed[:MOST_SHOWN]:
        print(f"{verdict.replay}    # {verdict.name}: {verdict.what.strip().splitlines()[0][:120]}")


def _tell(schedule: Schedule) -> int:
    print("\n".join(schedule.lines()))

    def see(event: Any) -> None:
        if event.kind not in ("progressed", "round_landed", "epoch_ended"):
            told = {k: v for k, v in vars(event).items() if k not in ("time", "traceback", "summary", "host", "pid")}
            print(f"{event.time:9.3f}  {event.kind}  " + ", ".join(f"{k}={v}" for k, v in told.items())[:200])

    verdict = play(schedule, [see])
    print(("passed: " if verdict.ok else "FAILED: ") + verdict.what)
    return 0 if verdict.ok else WorkerError.exit_code


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if not first.isdecimal() or (":" in text and not last.isdecimal()) or (last and int(last) <= int(first)):
        raise ConfigError(f"--seeds {text!r} is not understood; give one seed, or a range such as 0:1000")
    return range(int(first), int(last) if last else int(first) + 1)
