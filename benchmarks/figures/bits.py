"""Relay with few bits in few fragments against more bits in more: what is learnt from equal rows, in virtual time.

    python benchmarks/figures/bits.py measure --out benchmarks/results/bits.json
    python benchmarks/figures/bits.py table benchmarks/results/bits.json

Rows are drawn from a network of random weights, with a tenth of the labels drawn anew, and no row is seen twice. The
network has 223,000 parameters, so that messages are long beside what is said with them. Free communication is
`Synchronous` on a wire that takes no time. "4/9" is four bits in nine fragments, "4" in as many as Relay chooses,
"auto" what Relay chooses. "auto+displacements" and "auto+gradients" say what is sent as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire_lab.bench.report import about

FEATURES, CLASSES, STEP_S = 64, 10, 0.1
HELD_OUT = 10_000
FREE = "free"
KEYS = ("optimizer", "workers", "batch", "steps", "latency_s", "ratio", "bits")
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


@functools.cache
def drawn(count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows, and the classes that a network of random weights gives them, nine times of ten."""
    chance = torch.Generator().manual_seed(0)
    layers = [
        torch.randn(a, b, generator=chance) * (2 / a) ** 0.5 for a, b in ((FEATURES, 96), (96, 96), (96, CLASSES))
    ]
    x = torch.randn(count, FEATURES, generator=chance)
    scores = (x @ layers[0]).relu() @ layers[1]
    label = (scores.relu() @ layers[2]).argmax(1)
    noisy = torch.rand(count, generator=chance) < 0.1
    label[noisy] = torch.randint(CLASSES, (int(noisy.sum()),), generator=chance)
    return {"x": x.numpy(), "label": label.numpy()}


def strategy_of(bits: str) -> tw.Strategy:
    if bits == FREE:
        return tw.Synchronous()
    packed, _, sends = bits.partition("+")
    width, _, count = packed.partition("/")
    kept: dict[str, Any] = {"bits": "auto" if width == "auto" else int(width), "sends": sends or "auto"}
    return tw.Relay(**kept, fragments=int(count) if count else "auto")


def trial(given: argparse.Namespace, ratio: float, bits: str, seed: int) -> dict[str, Any]:
    """One run: its validation loss and accuracy, and what Relay had chosen at its end."""
    rows = drawn(given.workers * given.batch * given.steps + HELD_OUT)
    last = len(rows["label"]) - HELD_OUT
    log: list[events.SettingChanged] = []
    size = 4 * sum(p.numel() for p in network().parameters())
    wire = {"link": 1e15, "latency_s": 0.0} if bits == FREE else {"link": 2 * size / (ratio * STEP_S)}
    wire |= {"latency_s": given.latency_s} if bits != FREE else {}
    result = tw.fit(
        network,
        {name: values[:last] for name, values in rows.items()},
        inputs=["x"],
        optimizer=OPTIMIZERS[given.optimizer],
        scheduler={"name": "cosine", "every": "step"},
        strategy=strategy_of(bits),
        cluster=tw.Simulated(workers=given.workers, step_s=STEP_S, **wire),
        steps=given.steps,
        batch_size=given.batch,
        validation={name: values[last:] for name, values in rows.items()},
        evaluate_every=given.steps,
        seed=seed,
        callbacks=[lambda e: log.append(e) if isinstance(e, events.SettingChanged) else None],
        progress=False,
    )
    setting = log[-1].setting if log else {}
    told = {key: setting.get(key) for key in ("codec", "fragments", "momentum")}
    found = {"val_loss": result.history[-1]["val_loss"], "val_accuracy": result.history[-1]["val_accuracy"]}
    return {"ratio": ratio, "bits": bits, "seed": seed, **found, **told, "busy": result.summary["busy"]}


def measure(given: argparse.Namespace) -> None:
    """Every case that the file does not have yet."""
    path = Path(given.out)
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    same = {key: getattr(given, key) for key in ("workers", "batch", "steps", "optimizer", "latency_s")}
    for ratio in given.ratios:
        for bits in given.bits:
            for seed in given.seeds:
                case = same | {"ratio": 0.0 if bits == FREE else ratio, "bits": bits, "seed": seed}
                if any(case.items() <= run.items() for run in runs):
                    continue
                began = time.perf_counter()
                found = same | trial(given, case["ratio"], bits, seed)
                runs.append(found | about(" ".join(sys.argv)))
                print(json.dumps(found), f"{time.perf_counter() - began:.0f} s", flush=True)
                path.write_text(json.dumps({"name": path.stem, "runs": runs}, indent=1) + "\n")


def table(given: argparse.Namespace) -> None:
    """A row for each optimizer, size and ratio; a column for each codec: mean loss, accuracy and fragments."""
    runs = json.loads(Path(given.out).read_text())["runs"]
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        kinds[tuple(run[name] for name in KEYS)].append(run)
    for key, found in sorted(kinds.items(), key=str):
        loss, score = (statistics.mean(run[name] for run in found) for name in ("val_loss", "val_accuracy"))
        cut = sorted({(run["codec"], run["fragments"], run["momentum"]) for run in found}, key=str)
        print(*key, f"{loss:.4f} nats, {100 * score:.2f} %, {len(found)} seeds", cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measured = verbs.add_parser("measure")
    measured.add_argument("--out", default="benchmarks/results/bits.json")
    measured.add_argument("--workers", type=int, default=8)
    measured.add_argument("--batch", type=int, default=16)
    measured.add_argument("--steps", type=int, default=800)
    measured.add_argument("--latency-s", type=float, default=0.0)
    measured.add_argument("--optimizer", choices=list(OPTIMIZERS), default="momentum")
    measured.add_argument("--ratios", type=float, nargs="+", default=[4.0, 16.0, 64.0])
    measured.add_argument("--bits", nargs="+", default=[FREE, "4", "2", "1"])
    measured.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    measured.set_defaults(act=measure)
    shown = verbs.add_parser("table")
    shown.add_argument("out")
    shown.set_defaults(act=table)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.act(given)


if __name__ == "__main__":
    main()
