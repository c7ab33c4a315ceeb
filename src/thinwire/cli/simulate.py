"""`thinwire simulate`: time to a target by strategy and number of workers, before anything is spent."""

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
from thinwire.engine.stopping import Target, smaller_is_better
from thinwire.errors import ConfigError, DivergedError
from thinwire.recipe import Recipe
from thinwire.strategies import strategy

DEFAULT = "synchronous,sparknet,easgd,mpca,diloco,relay"
MEASURED = ("train_seconds", "steps", "rounds", "bytes_sent", "busy", "workers_lost")


def simulate(options: argparse.Namespace) -> int:
    """Runs a recipe under each strategy on each number of workers; returns the exit code."""
    sys.path.insert(0, os.getcwd())  # so that a factory beside the recipe is found
    chosen = recipes.load(options.recipe, options.changes)
    sizes = _counts(options.workers)
    named = [_strategy(chosen, text) for text in options.strategies.split(",")]
    trials = _run_all(chosen, sizes, named, options, shown=not options.json)
    target = _target(chosen)
    if target is not None:
        _compare(trials)
    found = {
        "recipe": options.recipe,
        "link": options.link,
        "target": chosen.train.until,
        "machine": _machine(options),
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("simulating", total=len(work))
        for size, knobs in work:
            name = "one worker" if size == 1 else _label(knobs)
            progress.update(task, description=f"{name}, {size} workers" if size > 1 else name)
            trials.append({"strategy": name, "workers": size} | _trial(chosen, size, knobs, options))
            progress.advance(task)
    return trials


def _trial(chosen: Recipe, size: int, knobs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One run in virtual time."""
    cluster = dataclasses.replace(
        chosen.cluster,
        kind="simulated",
        workers=size,
        link=options.link,
        latency_ms=options.latency,
        step_s=options.step or (chosen.cluster.step_s if options.ratio is None else None),
        ratio=options.ratio or (chosen.cluster.ratio if options.step is None else None),
        spread=options.spread if options.spread is not None else chosen.cluster.spread,
    )
    asked = dataclasses.replace(chosen, cluster=cluster, strategy=knobs)
    target, began = _target(chosen), time.perf_counter()
    try:
        result = run(asked, out=None, resume=None, progress=False)
    except DivergedError as error:
        return {"seconds": None, "diverged": str(error), "real_s": time.perf_counter() - began}
    curve = [
        {k: row[k] for k in ("seconds", "steps", "epoch", "rows") if k in row}
        | {k: v for k, v in row.items() if k.startswith("val_")}
        for row in result.history
    ]
    reached = [row for row in result.history if target is not None and target.reached(row)]
    return {
        "seconds": reached[0]["seconds"] if reached else None,
        "reached_steps": reached[0]["steps"] if reached else None,
        "curve": curve,
        "real_s": round(time.perf_counter() - began, 3),
    } | {name: result.summary.get(name) for name in MEASURED}


def _compare(trials: list[dict[str, Any]]) -> None:
    """How much sooner than one worker each got there."""
    alone = next((t["seconds"] for t in trials if t["workers"] == 1), None)
    for trial in trials:
        trial["speedup"] = alone / trial["seconds"] if alone and trial["seconds"] else None


def _print(found: dict[str, Any], target: Target | None) -> None:
    goal = found["target"] or "the end of the recipe"
    table = Table(title=f"to {goal}, at {found['link']} (virtual time)", title_justify="left")
    table.add_column("strategy")
    for name in ("workers", "seconds", "speed-up", "best", "steps", "busy", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for trial in found["trials"]:
        if last not in (None, trial["workers"]):
            table.add_section()
        last = trial["workers"]
        table.add_row(*_row(trial, target))
    Console().print(table)


def _row(trial: dict[str, Any], target: Target | None) -> list[str]:
    head = [trial["strategy"], str(trial["workers"])]
    if "diverged" in trial:
        return [*head, "diverged", "", "", "", "", ""]
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
    """The numbers as JSON, and pictures of them where matplotlib is there."""
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
    """A name with knobs, as in "sparknet:period=50"; those of the recipe where it is the recipe's own strategy."""
    name, *given = text.strip().split(":")
    values: dict[str, Any] = {"strategy": {}}
    if chosen.strategy.get("name", "relay") == name:
        values["strategy"] = dict(chosen.strategy)
    values["strategy"]["name"] = name
    for change in given:
        recipes.apply(values, f"strategy.{change}")
    knobs: dict[str, Any] = values["strategy"]
    strategy(name, {key: value for key, value in knobs.items() if key != "name"})  # refuses what it does not know
    return knobs


def _label(knobs: dict[str, Any]) -> str:
    given = [f"{key}={value}" for key, value in knobs.items() if key != "name"]
    return ":".join([str(knobs["name"]), *given])


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    given = {"latency_ms": options.latency, "step_s": options.step, "ratio": options.ratio, "spread": options.spread}
    return {name: value for name, value in given.items() if value is not None}
