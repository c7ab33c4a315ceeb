"""`thinwire bench comparison`: thinwire's strategies against the alternatives for a user of a Spark cluster.

All methods train the same network on the same rows, with the same seed, steps and target, on four nodes of a Spark
testbed with the same emulated network; each in real processes that Spark starts. The clock starts with the first step.
Steps are paced, because otherwise the two processors and not the network would be the limit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from thinwire.errors import ConfigError, WorkerError
from thinwire.units import rate_bytes
from thinwire_lab.bench.race import Race, plain_loss, prepare, reference_loss
from thinwire_lab.bench.report import Report, Row, Say
from thinwire_lab.sparkbed import SparkBed

WORKERS, MEMORY = 4, "1g"
SETS = "THINWIRE_SETS"
"""Variable with a folder that contains Fashion-MNIST; without it, the built-in digits are used."""
ELEPHAS = "THINWIRE_ELEPHAS"
"""Variable with a Python that has Elephas, which needs other versions of its dependencies."""
OURS = ("relay", "auto", "mpca", "easgd", "sparknet")
FIXED = ("relay", "mpca", "easgd", "sparknet", "synchronous")
SEEDS = 3
"""Seeds of thinwire's methods; torch's own methods use the first seed only."""
CHOICE = "THINWIRE_METHODS"
"""Variable with the methods to compare instead of all, and the number of seeds: `relay,auto:6`."""
TORCHS = ("one machine", "ddp powersgd", "post-local sgd", "ddp half", "ddp")


def parameters(inputs: int, width: int) -> int:
    """Parameters of the network."""
    return (inputs + 1) * width + (width + 1) * width + (width + 1) * 10


def race(ratio: float, rate: str, width: int, inputs: int, **more: Any) -> Race:
    """A race in which the whole float32 model takes the time of `ratio` steps to cross a link and back."""
    exchange_s = 2 * 4 * parameters(inputs, width) * (WORKERS - 1) / WORKERS / rate_bytes(rate)
    return Race(width=width, step_s=exchange_s / ratio, rate=rate, ratio=ratio, inputs=inputs, **more)


RACES = ((1, "1gbit", 896), (1, "100mbit", 256), (10, "100mbit", 896), (30, "50mbit", 896))
"""Ratio, rate and width. At 100 Mbit and a ratio of 30, two processors cannot step for four machines."""


def comparison(quick: bool, say: Say) -> Report:
    """Time to the target, loss after equal rows, and share of time spent stepping, by method."""
    why_not = SparkBed.why_not()
    if why_not is not None:
        return Report("comparison", [], {}, [f"all of it: {why_not}"])
    with tempfile.TemporaryDirectory(prefix="thinwire-comparison-") as folder:
        sets = os.environ.get(SETS)
        data = f"fashion-mnist:{os.path.join(sets, 'fashion-mnist')}" if sets else "digits"
        path = os.path.join(folder, "rows.npz")
        inputs = prepare(data, path)
        say(f"{data.split(':')[0]}, {inputs} inputs a row")
        races = [race(*shape, inputs, rows=path) for shape in RACES]
        if quick:
            races = [dataclasses.replace(races[2], steps=100)]
        report = _race(races, quick, say)
    report.measured["data"] = data.split(":")[0]
    return report


def _race(races: list[Race], quick: bool, say: Say) -> Report:
    rows: list[Row] = []
    measured: dict[str, Any] = {"workers": WORKERS, "races": []}
    skipped: list[str] = []
    for untold in races:
        each = dataclasses.replace(untold, target=reference_loss(untold, WORKERS))
        exact = ("synchronous",) if each.ratio < 10 else ()  # ddp has the same losses and takes the same time
        methods: tuple[str, ...] = ("relay", "ddp") if quick else (*OURS, *exact, *TORCHS)
        chosen, count = choice(os.environ.get(CHOICE, ""))
        methods = chosen or methods
        found: dict[str, dict[str, Any]] = {}
        name = f"ratio {each.ratio:g} at {each.rate}"
        say(f"{name}: steps of {each.step_s * 1e3:.0f} ms, target {each.target:.4f}")
        for run in _runs(each, methods, count):
            if "error" in run:
                skipped.append(f"{name}, {run['method']}: {run['error']}")
                continue
            if run["method"] in found:
                found[run["method"]].setdefault("again", []).append(run)
            else:
                found[run["method"]] = run
            say(f"{name}: {run['method']} in {run['seconds']:.0f} s")
        python = os.environ.get(ELEPHAS)
        if chosen:
            skipped.append(f"{name}: all but {', '.join(chosen)}")
        elif python and not quick:
            try:
                found["elephas"] = _elephas(python, each)
            except (WorkerError, subprocess.TimeoutExpired) as error:
                skipped.append(f"{name}, Elephas: {error}")
        elif not quick:
            skipped.append(f"{name}, Elephas: set {ELEPHAS} to a Python that has it")
        measured["races"].append({"race": dataclasses.asdict(each) | {"rows": ""}, "methods": found})
        seeds = [run["seed"] for run in turns(found["relay"])] if "relay" in found else []
        plain = [plain_loss(dataclasses.replace(each, seed=seed), WORKERS) for seed in seeds]
        measured["races"][-1]["plain"] = plain
        rows += judge(each, found, statistics.mean(plain) if plain else None)
    return Report("comparison", rows, measured, skipped)


def choice(text: str) -> tuple[tuple[str, ...], int]:
    """The methods in `THINWIRE_METHODS`, and the number of seeds of each.

    >>> choice("relay,auto:6"), choice("")
    ((('relay', 'auto'), 6), ((), 3))
    """
    names, _, seeds = text.partition(":")
    chosen, known = tuple(filter(None, names.split(","))), dict.fromkeys((*OURS, *FIXED, *TORCHS))
    if not set(chosen) <= set(known) or not (seeds or "1").isdecimal() or seeds == "0":
        raise ConfigError(
            f"{CHOICE}={text!r} is not understood; write names and a number of seeds, such as relay,auto:6; names are "
            f"{', '.join(known)}"
        )
    return chosen, int(seeds or SEEDS)


def _runs(each: Race, methods: tuple[str, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """Results of the methods, one by one."""
    turns = {name: seeds if name in OURS else 1 for name in methods}
    order = [(name, seed) for name, count in turns.items() for seed in range(1, count + 1)]
    what = {"race": dataclasses.asdict(each), "turns": order, "workers": WORKERS}
    yield from _drive([sys.executable, "-m", "thinwire_lab.bench.rivals"], what, each.rate)


def _elephas(python: str, each: Race) -> dict[str, Any]:
    """Runs Elephas in an interpreter of its own, which makes its own testbed."""
    order = json.dumps({"race": dataclasses.asdict(each), "workers": WORKERS})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("src"))}
    argv = [python, "-m", "thinwire_lab.bench.elephas"]
    done = subprocess.run(argv, input=order + "\n", capture_output=True, text=True, env=environment, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise WorkerError(f"Elephas ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _drive(argv: list[str], order: dict[str, Any], rate: str) -> Iterator[dict[str, Any]]:
    with SparkBed(WORKERS, rate, memory=MEMORY) as bed, tempfile.TemporaryFile("w+") as log:
        process = bed.drive(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait(60):
            log.seek(0)
            raise WorkerError(f"the driver of the comparison ended with {process.returncode}: {log.read()[-3000:]}")


def judge(each: Race, found: dict[str, dict[str, Any]], plain: float | None = None) -> list[Row]:
    """The rows of one race: each method's time to the target, and what the papers and the plan promise.

    `plain` is the loss of plain SGD with all workers' rows in one batch, averaged over relay's seeds.
    """
    part = f"ratio {each.ratio:g} at {each.rate}"
    rows = []
    for method, run in sorted(found.items(), key=lambda item: to_target(each, item[1])[0]):
        seconds, steps, there = to_target(each, run)
        detail = f"{steps} steps" if there else f"not in {steps} steps"
        detail += f", {busy(each, run):.0%} stepping, loss {last_loss(run):.4f} after {run['steps']}"
        rows.append(Row(part, method, seconds, detail=detail, unit="s" if there else "s at least"))
    if "relay" not in found:
        return rows
    relay = found["relay"]
    mine = reached(each, relay)
    part += ", relay"
    if "one machine" in found:
        kept = busy(each, relay) / busy(each, found["one machine"])
        rows.append(Row(part, "steps in the same time as one machine, which exchanges nothing", kept))
    rows.append(Row(part, "share of a worker's time spent in steps", stepping(relay), 0.97))
    if each.ratio < 10 and "ddp" in found:
        ddp = reached(each, found["ddp"])
        rows.append(Row(part, "time against ddp", mine / ddp if ddp < math.inf else math.inf, 1.03, at_most=True))
    elif each.ratio >= 10:
        wanted = {"ddp": 5.0, "sparknet": 2.0, "mpca": 1.5, "easgd": 1.5, "ddp powersgd": 1.0}
        for method, target in wanted.items():
            if method in found:
                rows.append(Row(part, f"faster than {method}", to_target(each, found[method])[0] / mine, target))
    if plain is not None:
        apart = last_loss(relay) / plain - 1
        rows.append(Row(part, "loss after equal rows, above plain SGD's by", apart, 0.01, at_most=True))
    if "auto" in found:
        best = min(reached(each, found[m]) for m in FIXED if m in found)
        chosen = reached(each, found["auto"]) / best if best < math.inf else math.inf
        rows.append(Row(f"ratio {each.ratio:g} at {each.rate}, auto", "against the best", chosen, 1.1, at_most=True))
    return rows


def turns(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A method's run and its repetitions with other seeds."""
    return [run, *run.get("again", ())]


def to_target(each: Race, run: dict[str, Any]) -> tuple[float, int, bool]:
    """Seconds and steps until the target validation loss was reached; of the whole run if it was not.

    The median over the seeds.
    """
    found = sorted((_to_target(each, one) for one in turns(run)), key=lambda it: (not it[2], it[0]))
    return found[len(found) // 2]


def _to_target(each: Race, run: dict[str, Any]) -> tuple[float, int, bool]:
    for row in run["history"]:
        if row["val_loss"] is not None and row["val_loss"] <= each.target:
            return float(row["seconds"]), int(row["steps"]), True
    return float(run["seconds"]), int(run["steps"]), False


def reached(each: Race, run: dict[str, Any]) -> float:
    """Seconds until the target; infinite if it was not reached."""
    seconds, _, there = to_target(each, run)
    return seconds if there else math.inf


def last_loss(run: dict[str, Any]) -> float:
    """The mean validation loss over the last fifty steps and over the seeds."""
    return statistics.mean(_last_loss(one) for one in turns(run))


def _last_loss(run: dict[str, Any]) -> float:
    rows = [row for row in run["history"] if row["val_loss"] is not None]
    return statistics.mean(float(row["val_loss"]) for row in rows if row["steps"] > rows[-1]["steps"] - 50)


def busy(each: Race, run: dict[str, Any]) -> float:
    """Nominal time of the steps over their real time without evaluations; the mean over the seeds."""
    shares = [each.step_s * float(one["steps"]) / _running_s(one) for one in turns(run)]
    return statistics.mean(min(1.0, share) for share in shares)


def stepping(run: dict[str, Any]) -> float:
    """The summary's `busy`, corrected for the time of evaluations; the mean over the seeds."""
    shares = [float(one["busy"]) * float(one["seconds"]) / _running_s(one) for one in turns(run)]
    return statistics.mean(min(1.0, share) for share in shares)


def _running_s(run: dict[str, Any]) -> float:
    return float(run["seconds"]) - float(run.get("evaluated_s", 0.0))
