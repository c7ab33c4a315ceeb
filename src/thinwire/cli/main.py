"""`thinwire`: one command a verb, errors as sentences, exit codes that mean something."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from thinwire.cli.version import ShowVersion
from thinwire.errors import CheckpointError, Interrupted, LostWorkersError, ThinwireError, nearest

TRAIN_HELP = """\
Run a recipe. A recipe is a TOML file; recipes/digits.toml is a complete one.

  thinwire train recipes/digits.toml
  thinwire train recipes/digits.toml --set strategy.name=sparknet --set strategy.period=20
  thinwire train recipes/digits.toml --out runs/a          # events, summary and checkpoints
  thinwire train recipes/digits.toml --resume runs/a       # go on where that run stopped

Exit codes: 0 done as asked, 1 something unforeseen, 2 recipe or option not understood, 3 data, 4 your code failed
on a worker, 5 workers lost and not replaced, 6 a deadline passed, 7 the loss is not finite, 8 checkpoint, 9 a peer
broke the protocol, 130 Ctrl-C (a checkpoint is left).
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest word."""

    def error(self, message: str) -> Any:
        if "invalid choice" in message and self._subparsers is not None:
            given = message.split("'")[1]
            message = f"{given!r} is not a command. {nearest(given, _commands(self))}"
        self.print_usage(sys.stderr)
        self.exit(2, f"thinwire: {message}\n")


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices)
    return []


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = _Parser(prog="thinwire", description="Train PyTorch models over the Ethernet you already have.")
    top.add_argument("--version", action=ShowVersion, help="print the versions of thinwire and its parts")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    train = commands.add_parser(
        "train", help="run a recipe", description=TRAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    train.add_argument("recipe", metavar="RECIPE.toml", help="the recipe to run")
    train.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe"
    )
    train.add_argument("--out", metavar="DIR", help="folder or URL for events, summary and checkpoints")
    train.add_argument("--resume", metavar="DIR", help="go on from the newest checkpoint in that folder")
    train.add_argument("--json", action="store_true", help="print the summary as JSON, as the last line")
    train.add_argument(
        "--dashboard",
        nargs="?",
        const=True,
        metavar="HOST:PORT",
        help="serve a live page of the run, on a free port of this machine unless said",
    )
    page = commands.add_parser("dashboard", help="a page of runs in a browser, live or afterwards")
    page.add_argument("folders", nargs="+", metavar="DIR", help="out folders of runs; several are compared")
    page.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="a free port of this machine unless given"
    )
    bench = commands.add_parser("bench", help="run one of the measured comparisons")
    bench.add_argument(
        "name",
        metavar="NAME",
        help="comparison, dashboard, deaths, exchange, forecast, ingest, overhead, placement, predict, table, wire, or "
        "suite: all of them",
    )
    bench.add_argument("--json", action="store_true", help="print the result as JSON, as the last line")
    bench.add_argument("--quick", action="store_true", help="a shorter run with noisier numbers")
    bench.add_argument("--save", metavar="DIR", help="write the result with date and machine into that folder")
    doctor = commands.add_parser("doctor", help="look at a Spark cluster: is it ready to train on?")
    doctor.add_argument("--master", metavar="URL", help="the cluster; Spark embedded in this process unless given")
    doctor.add_argument(
        "--workers", type=int, metavar="N", help="workers to be; as many as there are slots unless given"
    )
    doctor.add_argument("--data", metavar="PATH", help="Parquet files: how many rows would each worker get?")
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    plan = commands.add_parser("plan", help="what a recipe would cost on a cluster, layer by layer")
    plan.add_argument("recipe", metavar="RECIPE.toml", help="the recipe to plan for")
    plan.add_argument("--workers", type=int, required=True, metavar="N", help="workers of the cluster")
    plan.add_argument("--link", default="1gbit", metavar="RATE", help="of every worker, both ways (1gbit)")
    plan.add_argument("--latency", type=float, default=0.1, metavar="MS", help="of one message (0.1)")
    plan.add_argument(
        "--group", type=int, metavar="M", help="workers of a replica; the fewest it fits into unless given"
    )
    plan.add_argument("--memory", metavar="SIZE", help="of each worker, such as 8gb; no limit unless given")
    plan.add_argument("--profile", action="store_true", help="time the layers here instead; the network is made for it")
    plan.add_argument("--gflops", type=float, metavar="F", help="of each worker; as one thread here unless given")
    plan.add_argument("--input", metavar="SHAPE", help="of one row, such as 3x224x224; as the data has it unless given")
    plan.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    _simulate(commands.add_parser("simulate", help="time to a target by strategy and workers, in virtual time"))
    caffe = commands.add_parser("caffe", help="look at Caffe's networks, solvers and weights, and convert them")
    acts = caffe.add_subparsers(dest="act", metavar="ACT", required=True, parser_class=_Parser)
    show = acts.add_parser("show", help="a network layer by layer, a solver's settings, or a caffemodel's blobs")
    convert = acts.add_parser("convert", help="weights from Caffe's form to safetensors, or back")
    convert.add_argument("--out", required=True, metavar="FILE", help="where to: .safetensors or .caffemodel")
    for act in (show, convert):
        act.add_argument("file", metavar="NET.prototxt", help="the network")
        act.add_argument("--weights", metavar="FILE", help="a caffemodel, or safetensors that were converted before")
        act.add_argument("--input", metavar="SHAPE", help="of one row, such as 3x32x32, where the network tells none")
        act.add_argument("--phase", choices=("TRAIN", "TEST"), default="TEST", help="which layers it has (TEST)")
    _testbed(commands.add_parser("testbed", help="Spark on an emulated network; what goes wrong on purpose"))
    return top


def _testbed(bed: argparse.ArgumentParser) -> None:
    acts = bed.add_subparsers(dest="act", metavar="ACT", required=True, parser_class=_Parser)
    run = acts.add_parser(
        "run", help="run a command on the driver's node; it finds the cluster in THINWIRE_MASTER (root only)"
    )
    run.add_argument("--nodes", type=int, default=4, metavar="N", help="Spark workers, a namespace each (4)")
    run.add_argument("--rate", default="1gbit", metavar="RATE", help="of every node's link, both ways (1gbit)")
    run.add_argument("--cores", type=int, default=1, metavar="N", help="task slots of each node (1)")
    run.add_argument("--memory", default="1g", metavar="SIZE", help="of each executor (1g)")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command")
    play = acts.add_parser("schedules", help="the protocol in virtual time, under what seeds make go wrong")
    play.add_argument("--seeds", default="0:1000", metavar="A:B", help="from A to B - 1; one alone is told (0:1000)")
    play.add_argument("--jobs", type=int, metavar="N", help="processes (one a processor)")
    play.add_argument("--strategy", metavar="NAME", help="of the menu of schedules; drawn by the seed unless given")
    play.add_argument("--record", metavar="FILE", help="add the counts to those of other seeds in a file")
    play.add_argument("--json", action="store_true", help="print the counts as JSON")
    chaos = acts.add_parser("chaos", help="real runs, and what is done to their processes and links on purpose")
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of the first bout; each has the next (0)")
    chaos.add_argument("--minutes", type=float, default=5.0, metavar="M", help="after which no bout begins (5)")
    chaos.add_argument("--kills", type=int, metavar="K", help="after which none does; no limit unless given")
    chaos.add_argument("--deeds", type=int, default=12, metavar="N", help="in one bout (12)")
    chaos.add_argument("--arenas", default="local", metavar="NAME,…", help="local, spark, bed, host (local)")
    chaos.add_argument("--strategies", metavar="NAME,…", help="in turn; all unless given")
    chaos.add_argument("--out", metavar="DIR", help="for the runs and the report; goes on with what is there")
    chaos.add_argument("--json", action="store_true", help="print the totals as JSON")
    soak = acts.add_parser("soak", help="a long run in which a worker dies again and again, and what it comes to hold")
    soak.add_argument("--minutes", type=float, default=60.0, metavar="M", help="with deaths (60)")
    soak.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between two deaths (60)")
    soak.add_argument("--arena", default="bed", metavar="NAME", help="bed, spark or local (bed)")
    soak.add_argument("--strategy", default="relay", metavar="NAME", help="(relay)")
    soak.add_argument("--exchange", default="auto", metavar="NAME", help="auto, mesh or spark (auto)")
    soak.add_argument("--out", metavar="DIR", help="folder for soak.json, with every look")
    soak.add_argument("--json", action="store_true", help="print what it came to as JSON")


def _simulate(sim: argparse.ArgumentParser) -> None:
    sim.add_argument("recipe", metavar="RECIPE.toml", help="the recipe to simulate; its train.until is the target")
    sim.add_argument("--workers", default="1,2,4,8", metavar="N,…", help="cluster sizes (1,2,4,8)")
    sim.add_argument("--link", metavar="RATE", help="of every worker, both ways (the recipe's, or 1gbit)")
    sim.add_argument("--latency", type=float, metavar="MS", help="of one message (the recipe's, or 0.1)")
    sim.add_argument(
        "--strategies",
        default="synchronous,sparknet,easgd,mpca,diloco,relay",
        metavar="NAME[:KNOB=VALUE],…",
        help="what to compare (the six of the papers and ours)",
    )
    sim.add_argument("--step", type=float, metavar="S", help="seconds of a worker's step; measured here unless given")
    sim.add_argument(
        "--ratio", type=float, metavar="R", help="instead, in how many steps the model crosses a link and back"
    )
    sim.add_argument("--spread", type=float, metavar="CV", help="of step times, standard deviation over mean")
    sim.add_argument("--out", metavar="DIR", help="folder for the numbers as JSON, and for pictures (PNG, SVG)")
    sim.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe"
    )
    sim.add_argument("--json", action="store_true", help="print the numbers as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "bench":
            from thinwire.cli.bench import bench

            return bench(options)
        if options.command == "testbed":
            from thinwire.cli.testbed import testbed

            return testbed(options)
        if options.command == "plan":
            from thinwire.cli.plan import show_plan

            return show_plan(options)
        if options.command == "simulate":
            from thinwire.cli.simulate import simulate

            return simulate(options)
        if options.command == "caffe":
            from thinwire.cli.caffe import act

            return act(options)
        if options.command == "dashboard":
            from thinwire.cli.dashboard import dashboard

            return dashboard(options)
        if options.command == "doctor":
            from thinwire.cli.doctor import doctor

            return doctor(options)
        return _train(options)
    except ThinwireError as error:
        return _complaint(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complaint("stopped at once; checkpoints written before are intact", Interrupted.exit_code)


def _complaint(message: str, code: int) -> int:
    """Says what went wrong, and which page of the documentation says what to do about it."""
    print(f"thinwire: {message}\nexit code {code}: see docs/reference/errors/exit-{code}.md", file=sys.stderr)
    return code


def _train(options: argparse.Namespace) -> int:
    from thinwire import recipe

    sys.path.insert(0, os.getcwd())  # so that a factory beside the recipe is found
    chosen = recipe.load(options.recipe, options.changes)
    if chosen.cluster.kind == "local":
        from thinwire.cluster.nursery import shared

        shared()  # it imports torch while this process does
    from thinwire.cli.dashboard import watching
    from thinwire.cli.tables import summary_table
    from thinwire.cli.wiring import run

    with watching(options.dashboard or chosen.run.dashboard, options.out or options.recipe) as callbacks:
        result = run(
            chosen,
            out=options.out,
            resume=options.resume,
            progress=not options.json,
            callbacks=callbacks,
        )
    if options.json:
        print(json.dumps(result.summary))
    else:
        summary_table(result.summary)
    if not result.summary["complete"]:
        raise LostWorkersError(
            "workers were lost and not replaced, so that not all rows were trained on; see the summary"
        )
    if result.summary["unsaved"]:
        raise CheckpointError(result.summary["unsaved"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
