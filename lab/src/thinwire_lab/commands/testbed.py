"""`thinwire testbed`: runs a command against a Spark cluster on an emulated network; and fault injection."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from thinwire.cli.extras import Command
from thinwire.errors import ConfigError
from thinwire_lab.sparkbed import SparkBed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `thinwire testbed`, and their options."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    run = acts.add_parser(
        "run", help="run a command on the driver's node; it finds the cluster in THINWIRE_MASTER (root only)"
    )
    run.add_argument("--nodes", type=int, default=4, metavar="N", help="Spark workers, a namespace each (4)")
    run.add_argument(
        "--rate", default="1gbit", metavar="RATE", help="rate of every node's link, in both directions (1gbit)"
    )
    run.add_argument("--cores", type=int, default=1, metavar="N", help="task slots of each node (1)")
    run.add_argument("--memory", default="1g", metavar="SIZE", help="memory of each executor (1g)")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command")
    play = acts.add_parser("schedules", help="run the protocol in virtual time, with faults drawn from seeds")
    play.add_argument(
        "--seeds",
        default="0:1000",
        metavar="A:B",
        help="seeds from A to B - 1; a single seed prints its events (0:1000)",
    )
    play.add_argument("--jobs", type=int, metavar="N", help="number of processes (default: one for each processor)")
    play.add_argument("--strategy", metavar="NAME", help="strategy of all schedules (default: drawn from the seed)")
    play.add_argument("--record", metavar="FILE", help="add the counts to those of other seeds in a file")
    play.add_argument("--digests", metavar="FILE", help="compare each seed's events with those of another tree")
    play.add_argument("--json", action="store_true", help="print the counts as JSON")
    chaos = acts.add_parser("chaos", help="inject faults into the processes and links of real runs")
    chaos.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first trial; each further trial has the next (0)"
    )
    chaos.add_argument("--minutes", type=float, default=5.0, metavar="M", help="after this time no trial begins (5)")
    chaos.add_argument(
        "--kills", type=int, metavar="K", help="after this number of kills no trial begins (default: no limit)"
    )
    chaos.add_argument("--deeds", type=int, default=12, metavar="N", help="faults in a trial (12)")
    chaos.add_argument(
        "--arenas", default="local", metavar="NAME,…", help="places of runs: local, spark, bed, host (local)"
    )
    chaos.add_argument("--strategies", metavar="NAME,…", help="strategies, in turn (default: all)")
    chaos.add_argument("--placements", metavar="NAME,…", help="drawn from the seed (default: whole, and groups of two)")
    chaos.add_argument(
        "--out", metavar="DIR", help="folder for the runs and the report; an existing report is continued"
    )
    chaos.add_argument("--json", action="store_true", help="print the totals as JSON")
    soak = acts.add_parser("soak", help="a long run whose workers are killed repeatedly; measures speed and resources")
    soak.add_argument("--minutes", type=float, default=60.0, metavar="M", help="length of the time with deaths (60)")
    soak.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between two deaths (60)")
    soak.add_argument("--arena", default="bed", metavar="NAME", help="place of the run: bed, spark or local (bed)")
    soak.add_argument("--strategy", default="relay", metavar="NAME", help="strategy of the run (relay)")
    soak.add_argument(
        "--exchange", default="auto", metavar="NAME", help="exchange of the run: auto, mesh or spark (auto)"
    )
    soak.add_argument("--out", metavar="DIR", help="folder for soak.json, with all measurements")
    soak.add_argument("--json", action="store_true", help="print the result as JSON")


def testbed(options: argparse.Namespace) -> int:
    """Runs a subcommand; if it is terminated from outside, it removes what it has set up."""
    with _unwinding():
        return _act(options)


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _act(options: argparse.Namespace) -> int:
    if options.act == "schedules":
        from thinwire_lab.commands.schedules import schedules  # imported here: the other subcommands do not need torch

        return schedules(options)
    if options.act == "chaos":
        from thinwire_lab.commands.chaos import chaos

        return chaos(options)
    if options.act == "soak":
        from thinwire_lab.commands.soak import soak

        return soak(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Builds the cluster, runs the command on the driver's node, and removes the cluster; returns the exit code."""
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise ConfigError("testbed run needs a command: thinwire testbed run --nodes 4 -- python train.py")
    console = Console(stderr=True)
    with console.status(f"starting Spark on {options.nodes} nodes at {options.rate}"):
        cluster = SparkBed(options.nodes, options.rate, cores=options.cores, memory=options.memory).__enter__()
    try:
        console.print(f"Spark is at {cluster.master} (THINWIRE_MASTER), one executor on each of {options.nodes} nodes")
        return cluster.drive(words, stdin=sys.stdin, start_new_session=False).wait()
    finally:
        cluster.close()


COMMAND = Command(add_options, testbed)
