"""The papers' own figures on a network that two cores can train, in virtual time with real gradients.

    python benchmarks/figures/papers.py measure fashion-mnist:DIR benchmarks/results/papers.json
    python benchmarks/figures/papers.py draw benchmarks/results/papers.json docs/images

SparkNet's Fig. 3 (gain by workers and τ, free communication), Fig. 4 (gain as an exchange gets dearer) and Fig. 7
(progress by τ); MPCA's Fig. 10a (extrapolation), 10c (stragglers, by weighting) and 13c (gain by workers); DeepSpark's
Fig. 4 (progress by τ) and 5 (discrepancy penalty by workers). 20,000 rows of 196 pixels, batches of 8, a constant
rate at which one worker alone is held back by its noise; the target is a validation accuracy.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

import thinwire as tw
from thinwire.rules.speedup import discrepancy, naive_speedup, rounds_speedup
from thinwire_lab.bench.race import Race, prepare

TARGET, STEP_S, STEPS, EVERY, BATCH, RATE = 0.80, 0.1, 1500, 10, 8, 0.03
WORKERS, PERIODS = (2, 4, 8), (1, 2, 5, 10, 25, 50, 100)
MORE_WORKERS, SPARK_PERIODS = (2, 4, 8, 16), (10, 20, 50)
RATIO = 12.0
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
SEEDS = (0, 1, 2)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


class Study:
    """The rows, and a run on them."""

    def __init__(self, data: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/rows.npz"
            inputs = prepare(data, path)
            parts = Race(width=1, step_s=0.0, rate="", ratio=0.0, rows=path).load()
        self.rows, self.held = (
            pa.table(
                {"pixels": pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), inputs), "label": y.numpy()}
            )
            for x, y in parts
        )

    def run(
        self, strategy: tw.Strategy, workers: int, ratio: float | None, seed: int, *, until: bool = True, **more: Any
    ) -> dict[str, Any]:
        """One run, to the target or for all steps; without a ratio communication is free."""
        size = 4 * sum(p.numel() for p in network().parameters())
        link = 1e13 if ratio is None else 2 * size / (ratio * STEP_S)
        steps = more.pop("steps", STEPS)
        result = tw.fit(
            network,
            self.rows,
            inputs=["pixels"],
            optimizer=more.pop("optimizer", None) or functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
            strategy=strategy,
            cluster=tw.Simulated(workers=workers, link=link, latency_s=0.0, step_s=STEP_S, seed=seed, **more),
            steps=steps,
            until=f"val_accuracy >= {TARGET}" if until else None,
            batch_size=BATCH,
            validation=self.held,
            evaluate_every=EVERY,
            seed=seed,
            progress=False,
        )
        curve = [[row["steps"], row["seconds"], row["val_accuracy"], row["val_loss"]] for row in result.history]
        hit = next(((steps, seconds) for steps, seconds, accuracy, _ in curve if accuracy >= TARGET), None)
        found = {"strategy": repr(strategy), "workers": workers, "ratio": ratio, "seed": seed, "more": str(more)}
        found |= {"steps": hit and hit[0], "seconds": hit and hit[1], "curve": curve}
        print({k: v for k, v in found.items() if k != "curve"}, file=sys.stderr, flush=True)
        return found


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


def measure(data: str, out: str) -> None:
    study = Study(data)
    run = study.run
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
    }
    found |= {"command": f"python benchmarks/figures/papers.py measure {data.split(':')[0]}:DIR {out}"}
    found |= {"target": TARGET, "step_s": STEP_S, "rate": RATE, "batch_size": BATCH}
    found["alone"] = [run(tw.SparkNet(period=50), 1, None, seed, steps=6000) for seed in SEEDS]
    found["sparknet"] = [
        run(tw.SparkNet(period=t), k, None, 0, until=k < max(WORKERS)) for k in WORKERS for t in PERIODS
    ]
    found["extrapolation"] = [
        run(tw.MPCA(lookahead=gamma), 8, RATIO, seed, until=False, steps=600, optimizer=adam)
        for seed in SEEDS
        for gamma in (0.0, 0.7)
    ]
    slow = {0: 4.0, 1: 3.0}
    found["stragglers"] = [
        run(tw.MPCA(weigh_steps=weigh), 8, RATIO, seed, until=False, steps=600, optimizer=adam, slow=slow)
        for seed in SEEDS
        for weigh in (False, True)
    ]
    kinds = (tw.MPCA(), tw.Relay(), tw.SparkNet(period=round(5 * RATIO)), tw.EASGD(period=round(1.3 * RATIO)))
    found["gain"] = [run(kind, k, RATIO, 0) for kind in kinds for k in WORKERS]
    fixed = [tw.EASGD(period=t) for t in SPARK_PERIODS]
    found["deepspark"] = [run(kind, 8, RATIO, 0, until=False, steps=800) for kind in (*fixed, tw.DeepSpark(period=10))]
    found["discrepancy"] = [run(tw.EASGD(period=20), k, None, 0) for k in MORE_WORKERS]
    Path(out).write_text(json.dumps(found) + "\n")


def draw(source: str, folder: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from saving import save

    found = json.loads(Path(source).read_text())
    alone = sum(r["steps"] for r in found["alone"]) / len(found["alone"])
    figure, (heat, lines, curves) = plt.subplots(1, 3, figsize=(14, 4))
    grid = {(r["workers"], int(r["strategy"].split("period=")[1].split(",")[0])): r for r in found["sparknet"]}
    gains = [[alone / (grid[k, t]["steps"] or float("inf")) for t in PERIODS] for k in WORKERS]
    heat.imshow(gains, cmap="viridis", aspect="auto", origin="lower")
    for row, _ in enumerate(WORKERS):
        for column, _ in enumerate(PERIODS):
            text = f"{gains[row][column]:.1f}" if gains[row][column] else "–"
            heat.text(column, row, text, ha="center", va="center", color="white", fontsize=9)
    heat.set_xticks(range(len(PERIODS)), [str(t) for t in PERIODS])
    heat.set_yticks(range(len(WORKERS)), [str(k) for k in WORKERS])
    heat.set(xlabel="τ", ylabel="workers", title="SparkNet Fig. 3: gain, free communication")
    for k, colour in zip((4, 8), ("#0072b2", "#d55e00"), strict=True):
        rounds = {t: grid[k, t]["steps"] / t for t in PERIODS if grid[k, t]["steps"]}
        ours = [rounds_speedup(alone, rounds, 1.0, cost)[0] for cost in COSTS]
        lines.plot(COSTS, ours, color=colour, label=f"{k} workers, best τ")
        lines.plot(COSTS, [naive_speedup(k, 1.0, c) for c in COSTS], color=colour, ls="--", label=f"{k} workers, naive")
    lines.axhline(1.0, color="#999999", lw=0.8)
    lines.set(xscale="log", xlabel="seconds of an exchange / of a step", ylabel="gain", title="SparkNet Fig. 4")
    lines.legend(fontsize=8)
    for t, colour in zip((1, 10, 50, 100), ("#767676", "#009e73", "#0072b2", "#cc79a7"), strict=True):
        curve = grid[8, t]["curve"]
        times = [steps * (1 + RATIO / t) * STEP_S for steps, *_ in curve]  # what rounds of that ratio would take
        curves.plot(times, [100 * a for _, _, a, _ in curve], color=colour, label=f"τ = {t}")
    curves.set(
        xlabel=f"seconds, ratio {RATIO:g}",
        ylabel="validation accuracy, %",
        title="SparkNet Fig. 7: 8 workers",
        ylim=(50, 90),
        xlim=(0, 150),
    )
    curves.legend(fontsize=8)
    save(figure, f"{folder}/sparknet.svg")

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    for axes, key, names, title in (
        (left, "extrapolation", ("γ = 0", "γ = 0.7"), "MPCA Fig. 10a: extrapolation"),
        (middle, "stragglers", ("unweighted", "weighted by steps"), "MPCA Fig. 10c: two slow workers of 8"),
    ):
        for kind, colour in enumerate(("#767676", "#009e73")):
            runs = found[key][kind::2]
            points = list(zip(*(r["curve"] for r in runs), strict=False))
            times = [p[0][1] for p in points]
            mean = [sum(100 * (1 - one[2]) for one in p) / len(p) for p in points]
            axes.plot(times, mean, color=colour, label=names[kind])
        axes.set(xlabel="seconds", ylabel="validation error, % (mean of 3 seeds)", title=title)
        axes.legend(fontsize=8)
    seconds = alone * STEP_S
    for number, (name, colour) in enumerate(
        (("MPCA", "#009e73"), ("Relay", "#d55e00"), ("SparkNet", "#0072b2"), ("EASGD", "#cc79a7"))
    ):
        runs = found["gain"][number * len(WORKERS) : (number + 1) * len(WORKERS)]
        right.plot(
            WORKERS,
            [seconds / r["seconds"] if r["seconds"] else float("nan") for r in runs],
            "o-",
            color=colour,
            label=name,
        )
    right.plot(WORKERS, WORKERS, color="#999999", lw=0.8, label="linear")
    right.set(xlabel="workers", ylabel=f"gain to {TARGET:.0%} at ratio {RATIO:g}", title="MPCA Fig. 13c")
    right.legend(fontsize=8)
    save(figure, f"{folder}/mpca.svg")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4))
    names = [f"τ = {t}" for t in SPARK_PERIODS] + ["adaptive"]
    for one, name, colour in zip(found["deepspark"], names, ("#767676", "#0072b2", "#cc79a7", "#d55e00"), strict=True):
        left.plot([c[1] for c in one["curve"]], [c[3] for c in one["curve"]], color=colour, label=name)
    left.set(xlabel="seconds", ylabel="validation loss", title="DeepSpark Fig. 4: 8 workers", ylim=(0.4, 1.6))
    left.legend(fontsize=8)
    reached = [r for r in found["discrepancy"] if r["steps"]]
    counts = [r["workers"] for r in reached]
    penalty = [discrepancy(r["steps"], alone, r["workers"]) for r in reached]
    right.plot(counts, penalty, "o-", color="#0072b2", label="d(a, 20, n)")
    right.plot(counts, [n / d for n, d in zip(counts, penalty, strict=True)], "o-", color="#d55e00", label="n / d")
    right.set(xlabel="workers n", title="DeepSpark Fig. 5", ylim=(0, None))
    right.legend(fontsize=8)
    save(figure, f"{folder}/discrepancy.svg")


if __name__ == "__main__":
    {"measure": measure, "draw": draw}[sys.argv[1]](*sys.argv[2:])
