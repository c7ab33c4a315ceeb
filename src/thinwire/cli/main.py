"""The command `thinwire`, with its subcommands; errors are sentences, and exit codes name the kind of error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from thinwire.cli.extras import EXTRAS, load
from thinwire.cli.version import ShowVersion
from thinwire.errors import CheckpointError, Interrupted, LostWorkersError, ThinwireError, nearest

TRAIN_HELP = """\
Run a recipe. A recipe is a TOML file; recipes/digits.toml is a complete one.

  thinwire train recipes/digits.toml
  thinwire train recipes/digits.toml --set strategy.name=sparknet --set strategy.period=20
  thinwire train recipes/digits.toml --out runs/a          # events, summary and checkpoints
  thinwire train recipes/digits.toml --resume runs/a       # resume that run

Exit codes: 0 done as asked, 1 something unforeseen, 2 recipe or option not understood, 3 data, 4 your code failed
on a worker, 5 workers lost and not replaced, 6 a deadline passed, 7 the loss is not finite, 8 checkpoint, 9 a peer
broke the protocol, 130 Ctrl-C (a checkpoint is left).
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command."""

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


def parser(word: str | None = None) -> argparse.ArgumentParser:
    """All commands and their options.

    Args:
        word: The command given by the user; options of another package's command are added only for that command.
    """
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
    train.add_argument("--resume", metavar="DIR", help="resume from the newest checkpoint in that folder")
    train.add_argument("--json", action="store_true", help="print the summary as JSON, as the last line")
    train.add_argument(
        "--dashboard",
        nargs="?",
        const=True,
        metavar="HOST:PORT",
        help="serve a live page of the run (default: on a free port of this machine)",
    )
    page = commands.add_parser("dashboard", help="a page of runs in a browser, live or afterwards")
    page.add_argument("folders", nargs="+", metavar="DIR", help="out folders of runs; several are compared")
    page.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where to listen (default: a free port of this machine)",
    )
    doctor = commands.add_parser("doctor", help="check whether a Spark cluster is ready for training")
    doctor.add_argument("--master", metavar="URL", help="the cluster (default: Spark embedded in this process)")
    doctor.add_argument("--workers", type=int, metavar="N", help="number of workers (default: one for each slot)")
    doctor.add_argument("--data", metavar="PATH", help="Parquet files; shows the rows that each worker would get")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    _plan(commands.add_parser("plan", help="what a recipe would cost on a cluster, layer by layer"))
    _simulate(commands.add_parser("simulate", help="time to a target by strategy and workers, in virtual time"))
    export = commands.add_parser("export", help="write a saved model's network in a form that other programs run")
    export.add_argument("model", metavar="MODEL", help="the folder or URL that TorchModel.save was given")
    export.add_argument(
        "--onnx",
        nargs="?",
        const="",
        required=True,
        metavar="FILE",
        help="write an ONNX file (default: in this folder, named after the model's folder)",
    )
    _caffe(commands.add_parser("caffe", help="look at Caffe's networks, solvers and weights, and convert them"))
    _extras(commands, word)
    return top


def _plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("recipe", metavar="RECIPE.toml", help="the recipe to plan for")
    plan.add_argument("--workers", type=int, required=True, metavar="N", help="workers of the cluster")
    plan.add_argument(
        "--link", default="1gbit", metavar="RATE", help="rate of every worker's link, in both directions (1gbit)"
    )
    plan.add_argument("--latency", type=float, default=0.1, metavar="MS", help="latency of a message (0.1)")
    plan.add_argument(
        "--group",
        metavar="M",
        help="workers of a replica, or 'auto' for the shortest step (default: the fewest with enough memory)",
    )
    plan.add_argument("--memory", metavar="SIZE", help="memory of each worker, such as 8gb (default: no limit)")
    plan.add_argument("--profile", action="store_true", help="build the network and time its layers here")
    plan.add_argument(
        "--gflops", type=float, metavar="F", help="speed of each worker (default: that of one thread here)"
    )
    plan.add_argument(
        "--input", metavar="SHAPE", help="shape of one row, such as 3x224x224 (default: that of the data)"
    )
    plan.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--step", type=float, metavar="S", help="measured seconds of a step of one worker, C(b)")
    plan.add_argument("--exchange", type=float, metavar="S", help="measured seconds of an exchange of the model, S")
    plan.add_argument(
        "--run", metavar="DIR", help="take --step and --exchange from a run of synchronous, sparknet or diloco"
    )
    plan.add_argument("--alone", type=float, metavar="N", help="measured steps of one machine to the target")
    plan.add_argument(
        "--rounds", metavar="τ:M,…", help="measured rounds to the target by steps a round: SparkNet eq. 2"
    )
    plan.add_argument(
        "--discrepancy", metavar="τ:d,…", help="measured cost of asynchrony by period: DeepSpark eq. 2 to 4"
    )


def _caffe(caffe: argparse.ArgumentParser) -> None:
    acts = caffe.add_subparsers(dest="act", metavar="ACT", required=True, parser_class=_Parser)
    show = acts.add_parser("show", help="a network layer by layer, a solver's settings, or a caffemodel's blobs")
    convert = acts.add_parser("convert", help="weights from Caffe's form to safetensors, or back")
    convert.add_argument("--out", required=True, metavar="FILE", help="the file to write: .safetensors or .caffemodel")
    for act in (show, convert):
        act.add_argument("file", metavar="NET.prototxt", help="the network")
        act.add_argument("--weights", metavar="FILE", help="a caffemodel, or safetensors from an earlier conversion")
        act.add_argument("--input", metavar="SHAPE", help="shape of one row, such as 3x32x32, if the network has none")
        act.add_argument(
            "--phase", choices=("TRAIN", "TEST"), default="TEST", help="the phase whose layers are used (TEST)"
        )


def _extras(commands: argparse._SubParsersAction[_Parser], word: str | None) -> None:
    """Adds the commands of other packages; options are added only for the command given by the user."""
    for name, extra in EXTRAS.items():
        added = commands.add_parser(name, help=extra.help if word else extra.line(name))
        if name == word:
            command = load(name)
            command.options(added)
            added.set_defaults(run=command.run)


def _simulate(sim: argparse.ArgumentParser) -> None:
    sim.add_argument("recipe", metavar="RECIPE.toml", help="the recipe to simulate; its train.until is the target")
    sim.add_argument("--workers", default="1,2,4,8", metavar="N,…", help="cluster sizes (1,2,4,8)")
    sim.add_argument(
        "--link", metavar="RATE", help="rate of every worker's link, in both directions (the recipe's, or 1gbit)"
    )
    sim.add_argument("--latency", type=float, metavar="MS", help="latency of a message (the recipe's, or 0.1)")
    sim.add_argument(
        "--strategies",
        default="synchronous,sparknet,easgd,mpca,diloco,relay",
        metavar="NAME[:KNOB=VALUE],…",
        help="strategies to compare (default: the papers' and relay)",
    )
    sim.add_argument("--step", type=float, metavar="S", help="seconds of a worker's step (default: measured here)")
    sim.add_argument(
        "--ratio",
        type=float,
        metavar="R",
        help="in place of --step: steps in whose time the model crosses a link and back",
    )
    sim.add_argument("--spread", type=float, metavar="CV", help="standard deviation of step times over their mean")
    sim.add_argument("--out", metavar="DIR", help="folder for the numbers as JSON, and for plots (PNG, SVG)")
    sim.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe"
    )
    sim.add_argument("--json", action="store_true", help="print the numbers as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    word = next((word for word in arguments if not word.startswith("-")), None)
    try:
        options = parser(word).parse_args(arguments)
        if options.command in EXTRAS:
            code: int = options.run(options)
            return code
        if options.command == "plan":
            from thinwire.cli.plan import show_plan

            return show_plan(options)
        if options.command == "simulate":
            from thinwire.cli.simulate import simulate

            return simulate(options)
        if options.command == "export":
            from thinwire.cli.export import export

            return export(options)
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
        return _complaint("stopped at once; earlier checkpoints are intact", Interrupted.exit_code)


def _complaint(message: str, code: int) -> int:
    """Prints an error, and the page of the documentation about its exit code."""
    print(f"thinwire: {message}\nexit code {code}: see docs/reference/errors/exit-{code}.md", file=sys.stderr)
    return code


def _train(options: argparse.Namespace) -> int:
    from thinwire import recipe

    sys.path.insert(0, os.getcwd())  # for factories in the current folder
    chosen = recipe.load(options.recipe, options.changes)
    if chosen.cluster.kind == "local":
        from thinwire.cluster.fork_server import shared

        shared()  # the fork server imports torch while this process does
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
