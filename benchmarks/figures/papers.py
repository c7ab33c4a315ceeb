"""The papers' own figures on a network that two cores can train, in virtual time with real gradients.

    python benchmarks/figures/papers.py measure benchmarks/results/papers.json
    python benchmarks/figures/papers.py draw benchmarks/results/papers.json docs/images

SparkNet's Fig. 3 (gain by workers and τ, free communication), Fig. 4 (gain as an exchange gets dearer) and Fig. 7
(progress by τ); MPCA's Fig. 10a (extrapolation), 10c (stragglers, by weighting) and 13 (gain by workers). The target is
a validation accuracy of 95 % on the digits.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.rules.speedup import naive_speedup, rounds_speedup

TARGET, STEP_S, STEPS, EVERY = 0.95, 0.1, 600, 5
WORKERS, PERIODS = (2, 4, 8), (1, 2, 5, 10, 25, 50, 100)
RATIO = 12.0
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
SEEDS = (0, 1, 2)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def run(strategy: tw.Strategy, workers: int, ratio: float | None, seed: int, **more: Any) -> dict[str, Any]:
    """One run; without a ratio communication is free."""
    size = 4 * sum(p.numel() for p in network().parameters())
    link = 1e13 if ratio is None else 2 * size / (ratio * STEP_S)
    result = tw.fit(
        network,
        "digits",
        inputs=["pixels"],
        optimizer=more.pop("optimizer", None) or (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9)),
        strategy=strategy,
        cluster=tw.Simulated(workers=workers, link=link, latency_s=0.0, step_s=STEP_S, seed=seed, **more),
        steps=STEPS,
        batch_size=16,
        validation=0.2,
        evaluate_every=EVERY,
        seed=seed,
        progress=False,
    )
    curve = [[row["steps"], row["seconds"], row["val_accuracy"], row["val_loss"]] for row in result.history]
    hit = next(((steps, seconds) for steps, seconds, accuracy, _ in curve if accuracy >= TARGET), None)
    found = {"strategy": repr(strategy), "workers": workers, "ratio": ratio, "seed": seed, "more": str(more)}
    found |= {"steps": hit and hit[0], "seconds": hit and hit[1], "curve": curve[::2]}
    print({k: v for k, v in found.items() if k != "curve"}, file=sys.stderr, flush=True)
    return found


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


def measure(out: str) -> None:
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
    }
    found |= {"command": f"python {' '.join(sys.argv)}", "target": TARGET, "step_s": STEP_S}
    found["alone"] = [run(tw.SparkNet(period=50), 1, None, seed) for seed in SEEDS]
    found["sparknet"] = [run(tw.SparkNet(period=t), k, None, 0) for k in WORKERS for t in PERIODS]
    found["extrapolation"] = [
        run(tw.MPCA(lookahead=gamma), 8, RATIO, seed, optimizer=adam) for seed in SEEDS for gamma in (0.0, 0.7)
    ]
    slow = {0: 4.0, 1: 3.0}
    found["stragglers"] = [
        run(tw.MPCA(weigh_steps=weigh), 8, RATIO, seed, optimizer=adam, slow=slow)
        for seed in SEEDS
        for weigh in (False, True)
    ]
    kinds = (tw.MPCA(), tw.Relay(), tw.SparkNet(period=round(5 * RATIO)), tw.EASGD(period=round(1.3 * RATIO)))
    found["gain"] = [run(kind, k, RATIO, 0) for kind in kinds for k in WORKERS]
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
            heat.text(column, row, f"{gains[row][column]:.1f}", ha="center", va="center", color="white", fontsize=9)
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
        times = [steps * (1 + RATIO / t) * STEP_S for steps, *_ in curve]
        curves.plot(times, [100 * a for _, _, a, _ in curve], color=colour, label=f"τ = {t}")
    curves.set(
        xlabel=f"seconds, ratio {RATIO:g}",
        ylabel="validation accuracy, %",
        title="SparkNet Fig. 7: 8 workers",
        ylim=(60, 100),
        xlim=(0, 80),
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
        axes.set(yscale="log", xlabel="seconds", ylabel="validation error, % (mean of 3 seeds)", title=title)
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


if __name__ == "__main__":
    {"measure": measure, "draw": draw}[sys.argv[1]](*sys.argv[2:])
