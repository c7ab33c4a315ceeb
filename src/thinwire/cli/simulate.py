"""`thinwire simulate`: time to a target by strategy and number of workers, in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire import recipe as recipes
from thinwire.checkpoint import write_file
from thinwire.cli.wiring import run
from thinwire.coordinator.stopping import TRAIN_LOSS, Target, smaller_is_better
from thinwire.errors import ConfigError, ThinwireError
from thinwire.recipe import ClusterSection, Recipe
from thinwire.run.session import Result
from thinwire.strategies import strategy

DEFAULT = "synchronous,sparknet,easgd,mpca,diloco,relay"
MEASURED = ("train_seconds", "steps", "rounds", "bytes_sent", "busy", "workers_lost")


def simulate(options: argparse.Namespace) -> int:
    """Runs a recipe under each strategy on each number of workers; returns the exit code."""
    sys.path.insert(0, os.getcwd())  # for factories in the current folder
    chosen = recipes.load(options.recipe, options.changes)
    sizes = _counts(options.workers)
    named = [_strategy(chosen, text) for text in options.strategies.split(",")]
    trials = _run_all(chosen, sizes, named, options, shown=not options.json)
    target = _target(chosen)
    if target is not None:
        _compare(trials)
    found = {
        "recipe": options.recipe,
        "link": options.link or chosen.cluster.link,
        "target": chosen.train.until,
        "cluster": dataclasses.asdict(_cluster(chosen, options)),
        "trials": trials,
    }
    if options.out is not None:
        _save(found, options.out, target, shown=not options.json)
    if options.json:
        print(json.dumps(found))
    else:
        _print(found, target)
    return 0


def _run_all(
    chosen: Recipe,
    sizes: Sequence[int],
    named: Sequence[dict[str, Any]],
    options: argparse.Namespace,
    *,
    shown: bool,
) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = []
    work = [(size, knobs) for size in sizes for knobs in (named if size > 1 else named[:1])]
    step_s, ratio = options.step, options.ratio
    if step_s is None and ratio is None:
        step_s, ratio = chosen.cluster.step_s, chosen.cluster.ratio
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("simulating", total=len(work))
        for size, knobs in work:
            name = "one worker" if size == 1 else _label(knobs)
            progress.update(task, description=f"{name}, {size} workers" if size > 1 else name)
            cluster = dataclasses.replace(_cluster(chosen, options), workers=size, step_s=step_s, ratio=ratio)
            trials.append({"strategy": name, "workers": size} | _trial(chosen, cluster, knobs))
            if step_s is None and ratio is None:  # measured once, for all trials
                step_s = trials[-1].get("step_s")
            progress.advance(task)
    return trials


def _cluster(chosen: Recipe, options: argparse.Namespace) -> ClusterSection:
    """The recipe's simulated cluster, with the command's options applied."""
    given = {"link": options.link, "latency_ms": options.latency, "spread": options.spread}
    return dataclasses.replace(
        chosen.cluster, kind="simulated", **{name: value for name, value in given.items() if value is not None}
    )


def _trial(chosen: Recipe, cluster: ClusterSection, knobs: dict[str, Any]) -> dict[str, Any]:
    """One run in virtual time; writes nothing to the recipe's own folder."""
    nowhere = dataclasses.replace(chosen.run, out=None, checkpoint_every=None)
    asked = dataclasses.replace(chosen, cluster=cluster, strategy=knobs, run=nowhere)
    target, began = _target(chosen), time.perf_counter()
    try:
        result = run(asked, out=None, resume=None, progress=False)
    except ConfigError:
        raise
    except ThinwireError as error:  # continue with the other trials
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"seconds": None, "failed": failed, "real_s": round(time.perf_counter() - began, 3)}
    curve = [
        {k: row[k] for k in ("seconds", "steps", "epoch", "rows") if k in row}
        | {k: v for k, v in row.items() if k.startswith("val_")}
        for row in result.history
    ]
    reached = _reached(result, target)
    return {
        "seconds": reached.get("seconds"),
        "reached_steps": reached.get("steps"),
        "curve": curve,
        "step_s": result.summary["step_s"],
        "real_s": round(time.perf_counter() - began, 3),
    } | {name: result.summary.get(name) for name in MEASURED}


def _reached(result: Result, target: Target | None) -> dict[str, Any]:
    """When the run reached the target; empty if it did not. Only a training loss needs no evaluation."""
    if target is None:
        return {}
    if target.metric == TRAIN_LOSS:
        there, summary = result.summary["reason"].endswith(str(target)), result.summary
        return {"seconds": summary["train_seconds"], "steps": summary["steps"]} if there else {}
    return next((row for row in result.history if target.reached(row)), {})


def _compare(trials: list[dict[str, Any]]) -> None:
    """Adds the speed-up of each trial over one worker."""
    alone = next((t["seconds"] for t in trials if t["workers"] == 1), None)
    for trial in trials:
        trial["speedup"] = alone / trial["seconds"] if alone and trial["seconds"] else None


def _print(found: dict[str, Any], target: Target | None) -> None:
    goal = found["target"] or "the end of the recipe"
    table = Table(title=f"to {goal}, at {found['link']} (virtual time)", title_justify="left")
    table.add_column("strategy", overflow="fold")
    metric = target.metric if target is not None else "val_loss"
    for name in ("workers", "seconds", "speed-up", metric.removeprefix("val_"), "steps", "busy", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for trial in found["trials"]:
        if last not in (None, trial["workers"]):
            table.add_section()
        last = trial["workers"]
        table.add_row(*_row(trial, target))
    console = Console()
    console.print(table)
    for trial in found["trials"]:
        if "failed" in trial:
            console.print(f"{trial['strategy']}, {trial['workers']} workers: {trial['failed']}", highlight=False)
    steps = [trial["step_s"] for trial in found["trials"] if trial.get("step_s")]
    if steps:
        console.print(f"a step of one worker takes {steps[0] * 1e3:.3g} ms", highlight=False)


def _row(trial: dict[str, Any], target: Target | None) -> list[str]:
    head = [trial["strategy"], str(trial["workers"])]
    if "failed" in trial:
        return [*head, trial["failed"].partition("Error")[0].lower(), "", "", "", "", ""]
    seconds = trial["seconds"] if target is not None else trial["train_seconds"]
    gain = trial.get("speedup")
    return [
        *head,
        "not reached" if seconds is None else f"{seconds:,.1f}",
        "" if gain is None else f"{gain:.2f}",
        _best(trial, target),
        f"{trial['reached_steps'] or trial['steps']:,}",
        f"{trial['busy']:.2f}",
        f"{(trial['bytes_sent'] or 0) / 1e6:,.1f} MB",
    ]


def _best(trial: dict[str, Any], target: Target | None) -> str:
    metric = target.metric if target is not None else "val_loss"
    values = [row[metric] for row in trial["curve"] if metric in row]
    if not values:
        return ""
    return f"{min(values) if smaller_is_better(metric) else max(values):.4f}"


def _save(found: dict[str, Any], folder: str, target: Target | None, *, shown: bool) -> None:
    """Writes the numbers as JSON, and plots of them if matplotlib is installed."""
    base = folder.rstrip("/")
    write_file(f"{base}/simulated.json", (json.dumps(found, indent=1) + "\n").encode())
    try:
        from thinwire.cli.pictures import draw_trials

        for kind, data in draw_trials(found, target).items():
            write_file(f"{base}/simulated.{kind}", data)
    except ImportError:
        if shown:
            print("no picture: it needs matplotlib (pip install 'thinwire[plots]')", file=sys.stderr)


def _target(chosen: Recipe) -> Target | None:
    return Target.parse(chosen.train.until) if chosen.train.until else None


def _counts(text: str) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--workers {text!r} is not understood; write counts such as 1,2,4,8") from error
    if found[0] < 1:
        raise ConfigError(f"--workers {text!r} has a count below 1; use 1 or more")
    return found


def _strategy(chosen: Recipe, text: str) -> dict[str, Any]:
    """A name with knobs, as in "sparknet:period=50"; the recipe's knobs if the name is that of its own strategy."""
    name, *given = text.strip().split(":")
    values: dict[str, Any] = {"strategy": {}}
    if "=" in name:
        raise ConfigError(f"--strategies: {text!r} is not a name; knobs follow a name with colons, as in name:a=1:b=2")
    if chosen.strategy.get("name", "relay") == name:
        values["strategy"] = dict(chosen.strategy)
    values["strategy"]["name"] = name
    for change in given:
        if "=" not in change:
            raise ConfigError(f"--strategies {text!r} is not understood; write knobs as {name}:period=50")
        recipes.apply(values, f"strategy.{change}")
    knobs: dict[str, Any] = values["strategy"]
    strategy(name, {key: value for key, value in knobs.items() if key != "name"})  # raises for unknown knobs
    return knobs


def _label(knobs: dict[str, Any]) -> str:
    given = [f"{key}={value}" for key, value in knobs.items() if key != "name"]
    return ":".join([str(knobs["name"]), *given])
