"""How near Relay comes to free communication from equal rows, over a grid of tasks, in the product's virtual time.

    python -m thinwire_lab.bench.convergence --data DIR --out convergence.json --device cuda --jobs 14 --seconds 520

A cell is a task, a number of workers K, an exchange ratio R (in how many steps the whole float32 model crosses a link)
and a size of batches. In every cell Relay with its default settings and free communication (`Synchronous` on a wire
that takes no time) train from equal rows, each with two learning rates of which the better counts, and the same seeds.
The loss is that of held-out rows after the last step. Runs that are in the file already are not repeated, so that the
same command goes on where it stopped.

DIR holds `input.txt` (tiny Shakespeare) and `cifar10` (its binary files); tasks whose data are not there are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.data.builtin import TEXT_LENGTH
from thinwire.models import Mirror, Shift, model_by_name
from thinwire_lab.bench.report import Report, Row, Say, about

STEP_S, FREE_LINK = 0.1, 1e13
WORKERS, RATIOS, BATCHES = (4, 8, 16, 32, 64), (4.0, 16.0, 64.0, 256.0), ("small", "usual")
PAIRS = ((4.0, 64.0), (16.0, 256.0))
"""Ratios of one task, K and batch that share their free communication."""
WARM_UP = 0.05
FEATURES, CLASSES, HELD_OUT = 64, 10, 10_000
LONGEST_S = 1e6
"""A wait that is longer than any run."""
LOSS_WITHIN, POINTS_WITHIN = 1.01, 0.01
"""Times free communication's loss, and share of the held-out rows, within which a cell counts as equal."""


class CharacterTransformer(nn.Module):
    """Three causal layers of 128 units over bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(128, 128), nn.Parameter(0.02 * torch.randn(TEXT_LENGTH, 128))
        self.layers, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(128, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TEXT_LENGTH), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        seen = self.words(characters.long() % 128) + self.places
        found: Tensor = self.head(self.layers(seen, mask=self.mask, is_causal=True)).transpose(1, 2)
        return found


def augmented_resnet20() -> nn.Module:
    """ResNet-20 behind layers that shift and mirror images while it trains."""
    return nn.Sequential(Shift(4), Mirror(), model_by_name("resnet20")())


def table_network() -> nn.Module:
    """Four layers, 223,000 parameters, for rows of numbers."""
    return nn.Sequential(
        nn.Linear(FEATURES, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, its data and its optimizer; and the rows of a small and of a usual batch."""

    network: Callable[[], nn.Module]
    data: str
    optimizer: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, float]
    batches: tuple[int, int]
    by_accuracy: bool = False
    """Whether a cell is judged by accuracy rather than by loss."""


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


TASKS: dict[str, Task] = {
    "transformer": Task(
        network=CharacterTransformer, data="text", optimizer=torch.optim.AdamW, rates=(1e-3, 3e-3), batches=(4, 16)
    ),
    "lstm": Task(
        network=model_by_name("char_lstm"), data="text", optimizer=torch.optim.Adam, rates=(2e-3, 5e-3), batches=(4, 16)
    ),
    "table": Task(
        network=table_network, data="drawn", optimizer=torch.optim.AdamW, rates=(1e-3, 3e-3), batches=(4, 32)
    ),
    "resnet20": Task(
        network=augmented_resnet20,
        data="images",
        optimizer=_momentum,
        rates=(0.05, 0.15),
        batches=(8, 32),
        by_accuracy=True,
    ),
    "resnet20-adamw": Task(
        network=augmented_resnet20,
        data="images",
        optimizer=torch.optim.AdamW,
        rates=(1e-3, 3e-3),
        batches=(8, 32),
        by_accuracy=True,
    ),
}


class Cell(NamedTuple):
    task: str
    workers: int
    batch: str
    ratio: float
    """0: free communication."""


class Trial(NamedTuple):
    cell: Cell
    rate: float
    seed: int


def spread(shift: int = 0) -> list[Cell]:
    """Forty cells, evenly over the grid; another forty by another shift."""
    found = []
    for t, task in enumerate(TASKS):
        for g in range(4):
            workers, batch = WORKERS[(t + g + shift) % 5], BATCHES[(t + g + shift) % 2]
            found += [Cell(task, workers, batch, ratio) for ratio in PAIRS[(g // 2 + t + shift) % 2]]
    return found


def parsed(text: str) -> Cell:
    """A cell as the command line has it, TASK:K:BATCH:R.

    >>> parsed("table:8:small:16")
    Cell(task='table', workers=8, batch='small', ratio=16.0)
    """
    task, workers, batch, ratio = text.split(":")
    if task not in TASKS or batch not in BATCHES:
        raise SystemExit(
            f"{text!r} is no cell; write TASK:K:BATCH:R with {', '.join(TASKS)} and {' or '.join(BATCHES)}"
        )
    return Cell(task, int(workers), batch, float(ratio))


def trials(cells: Iterable[Cell], seeds: Sequence[int]) -> Iterator[Trial]:
    """What has to be run for these cells; the runs that take longest last, so that most cells are complete early."""
    with_free = {each for cell in cells for each in (cell, cell._replace(ratio=0.0))}
    for cell in sorted(with_free, key=lambda c: (c.workers, c.task, c.batch, c.ratio)):
        for seed in seeds:
            for rate in TASKS[cell.task].rates:
                yield Trial(cell, rate, seed)


def steps_of(steps: int, workers: int) -> int:
    """Steps of a run: fewer with more than 16 workers, whose steps have more rows.

    >>> [steps_of(400, workers) for workers in (4, 16, 32, 64)]
    [400, 400, 283, 200]
    """
    return round(steps * min(1.0, math.sqrt(16 / workers)))


@functools.lru_cache(maxsize=2)
def drawn(count: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows, and the classes that a network of random weights gives them, nine times of ten; no row is there twice."""
    chance = torch.Generator().manual_seed(0)
    first, second = (torch.randn(a, b, generator=chance) for a, b in ((FEATURES, 32), (32, CLASSES)))
    chance.manual_seed(1 + seed)
    x = torch.randn(count, FEATURES, generator=chance)
    label = ((x @ first / FEATURES**0.5).tanh() @ second).argmax(1)
    noisy = torch.rand(count, generator=chance) < 0.1
    label[noisy] = torch.randint(CLASSES, (int(noisy.sum()),), generator=chance)
    return {"x": x.numpy(), "label": label.numpy()}


def annealed(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that rises for a twentieth of the steps, and falls as a cosine does."""
    warm = WARM_UP * steps
    rate = lambda k: min(1.0, (k + 1) / (warm + 1)) * (1 + math.cos(math.pi * min(k, steps) / steps)) / 2  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _data(task: Task, folder: str, rows: int, seed: int) -> dict[str, Any]:
    if task.data == "drawn":
        all_rows = drawn(rows + HELD_OUT, seed)
        held = {name: values[rows:] for name, values in all_rows.items()}
        return {"data": {n: v[:rows] for n, v in all_rows.items()}, "validation": held, "inputs": ["x"]}
    name = f"text:{folder}/input.txt" if task.data == "text" else f"cifar10:{folder}/cifar10"
    column = "characters" if task.data == "text" else "pixels"
    return {"data": name, "validation": f"{name}?split=test", "inputs": [column]}


def run_trial(trial: Trial, *, folder: str, device: str, steps: int) -> dict[str, Any]:
    """One run: its held-out loss and accuracy, and what Relay chose."""
    cell, task, began = trial.cell, TASKS[trial.cell.task], time.perf_counter()
    batch, steps = task.batches[BATCHES.index(cell.batch)], steps_of(steps, cell.workers)
    size = 4 * sum(p.numel() for p in task.network().parameters())
    log: list[tw.events.SettingChanged] = []
    result = tw.fit(
        task.network,
        strategy=tw.Relay() if cell.ratio else tw.Synchronous(),
        cluster=tw.Simulated(
            workers=cell.workers, step_s=STEP_S, link=2 * size / (cell.ratio * STEP_S) if cell.ratio else FREE_LINK
        ),
        optimizer=functools.partial(task.optimizer, lr=trial.rate),
        scheduler=functools.partial(annealed, steps=steps),
        scheduler_every="step",
        steps=steps,
        batch_size=batch,
        evaluate_every=steps,
        seed=trial.seed,
        device=device,
        callbacks=[lambda event: log.append(event) if isinstance(event, tw.events.SettingChanged) else None],
        progress=False,
        **_data(task, folder, cell.workers * batch * steps, trial.seed),
    )
    last, summary = result.history[-1], result.summary
    return {
        **cell._asdict(),
        "rate": trial.rate,
        "seed": trial.seed,
        "steps": steps,
        "rows": summary["rows"],
        "parameters": size // 4,
        "val_loss": last["val_loss"],
        "val_accuracy": last["val_accuracy"],
        "busy": summary["busy"],
        "rounds": summary["rounds"],
        "settings": [[change.since, change.setting] for change in log],
        "choice": summary.get("choice"),
        "real_s": round(time.perf_counter() - began, 1),
    }


# -- many runs --------------------------------------------------------------------------------------------------------


def _prepare() -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _tried(trial: Trial, given: dict[str, Any]) -> dict[str, Any]:
    try:
        return run_trial(trial, **given)
    except Exception as error:  # the others are worth having all the same
        return {**trial.cell._asdict(), "rate": trial.rate, "seed": trial.seed, "error": repr(error)[:500]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(
    wanted: Sequence[Trial], runs: list[dict[str, Any]], given: dict[str, Any], *, jobs: int, seconds: float, keep: Any
) -> None:
    """Adds runs to those that there are, several at a time, until all are there or the time is over."""
    until = time.monotonic() + seconds
    known = {_key(run) for run in runs}
    left = [trial for trial in wanted if (*trial.cell, trial.rate, trial.seed) not in known]
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(min(jobs, max(1, len(left))), _prepare, maxtasksperchild=8) as pool:
        coming = pool.imap_unordered(functools.partial(_tried, given=given), left)
        for _ in left:
            try:
                run = coming.next(timeout=min(LONGEST_S, max(0.0, until - time.monotonic())))
            except multiprocessing.TimeoutError:
                break
            keep(run)
        pool.terminate()


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return (*(run[name] for name in Cell._fields), run["rate"], run["seed"])


def best(runs: Iterable[dict[str, Any]], cell: Cell, seeds: Sequence[int]) -> dict[str, Any] | None:
    """The better learning rate's mean loss and accuracy over the seeds; None where a run is missing."""
    by_rate: dict[float, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        if "error" not in run and all(run[name] == value for name, value in cell._asdict().items()):
            by_rate[run["rate"]][run["seed"]] = run
    task, found = TASKS[cell.task], []
    for rate in task.rates:
        mine = [by_rate[rate][seed] for seed in seeds if seed in by_rate[rate]]
        if len(mine) < len(seeds):
            return None
        loss, accuracy = (statistics.mean(run[name] for run in mine) for name in ("val_loss", "val_accuracy"))
        found.append({"rate": rate, "val_loss": loss, "val_accuracy": accuracy})
    key: Callable[[dict[str, Any]], float] = lambda one: (  # noqa: E731
        -one["val_accuracy"] if task.by_accuracy else _finite(one["val_loss"])
    )
    return min(found, key=key)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def compared(runs: Sequence[dict[str, Any]], cells: Iterable[Cell], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Every cell whose runs are all there: both sides, and whether they are equal."""
    found = []
    for cell in cells:
        relay, free = best(runs, cell, seeds), best(runs, cell._replace(ratio=0.0), seeds)
        if relay is None or free is None:
            continue
        loss, points = relay["val_loss"] / free["val_loss"], relay["val_accuracy"] - free["val_accuracy"]
        equal = points >= -POINTS_WITHIN if TASKS[cell.task].by_accuracy else loss <= LOSS_WITHIN
        found.append({**cell._asdict(), "relay": relay, "free": free, "loss": loss, "points": points, "equal": equal})
    return found


def convergence(quick: bool, say: Say) -> Report:
    """Relay against free communication in some cells of the grid; the whole of it wants a GPU (see the module)."""
    folder = os.environ.get("THINWIRE_DATA", "")
    names = [n for n, t in TASKS.items() if _there(t, folder)]
    cells = [c for c in spread() if c.task in names and c.workers <= (8 if quick else 64)]
    seeds, runs = (0,) if quick else (0, 1), list[dict[str, Any]]()
    wanted = list(trials(cells, seeds))
    say(f"{len(wanted)} runs in virtual time")
    given = {"folder": folder, "device": "auto", "steps": 60 if quick else 400}
    measure(wanted, runs, given, jobs=os.cpu_count() or 1, seconds=math.inf, keep=runs.append)
    rows = [
        Row("loss over free communication's", ":".join(map(str, cell[:4])), one["loss"], LOSS_WITHIN, at_most=True)
        for one in compared(runs, cells, seeds)
        for cell in [tuple(one[name] for name in Cell._fields)]
    ]
    missing = [f"{name}: its data are not in THINWIRE_DATA={folder!r}" for name in TASKS if name not in names]
    return Report("convergence", rows, {"runs": runs}, missing)


def _there(task: Task, folder: str) -> bool:
    wanted = {"text": "input.txt", "images": "cifar10"}.get(task.data)
    return wanted is None or os.path.exists(os.path.join(folder, wanted))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", metavar="DIR")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--known", nargs="*", default=[], metavar="FILE", help="files with runs that are not repeated")
    parser.add_argument("--cells", nargs="*", type=parsed, metavar="TASK:K:BATCH:R", help="forty, evenly, unless given")
    parser.add_argument("--shift", type=int, default=0, help="which forty")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=400, help="of a run with up to 16 workers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a process each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it stops")
    parser.add_argument("--commit", help="of the code, where this is no checkout")
    options = parser.parse_args()
    cells = [cell for cell in options.cells or spread(options.shift) if _there(TASKS[cell.task], options.data)]
    head = {"name": "convergence", **about(" ".join(["python", *sys.argv])), "steps": options.steps}
    head["commit"] = options.commit or head["commit"]
    head["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    runs: list[dict[str, Any]] = []
    for path in [path for path in (*options.known, options.out) if os.path.exists(path)]:
        with open(path) as file:
            there = json.load(file)["runs"]
        runs += [run for run in there if run.get("steps") == steps_of(options.steps, run["workers"])]

    def keep(run: dict[str, Any]) -> None:
        runs.append(run)
        shown = {name: run.get(name) for name in (*Cell._fields, "rate", "seed", "val_loss", "val_accuracy", "real_s")}
        print(json.dumps(shown | ({"error": run["error"]} if "error" in run else {})), flush=True)
        found = {**head, "cells": compared(runs, cells, options.seeds), "runs": runs}
        with open(options.out + ".partial", "w") as file:
            file.write(json.dumps(found, indent=1) + "\n")
        os.replace(options.out + ".partial", options.out)

    given = {"folder": options.data, "device": options.device, "steps": options.steps}
    measure(list(trials(cells, options.seeds)), runs, given, jobs=options.jobs, seconds=options.seconds, keep=keep)
    found = compared(runs, cells, options.seeds)
    for one in found:
        print(f"{one['task']:15} K={one['workers']:<3} {one['batch']:6} R={one['ratio']:<5g} loss × {one['loss']:.4f}"
              f"  points {100 * one['points']:+.2f}  {'equal' if one['equal'] else ''}")  # fmt: skip
    print(f"{sum(one['equal'] for one in found)} of {len(found)} cells equal, {len(cells)} wanted")


if __name__ == "__main__":
    main()
