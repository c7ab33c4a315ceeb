"""Plots of simulated runs; needs matplotlib."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from thinwire.coordinator.stopping import Target

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Colours of Okabe and Ito, which colour-blind readers can distinguish."""
MARKS = "osD^vP*X"
Trials = list[dict[str, Any]]


def draw_trials(found: dict[str, Any], target: Target | None) -> dict[str, bytes]:
    """Plots the speed-up by workers, and the curves of the largest cluster over time; returns PNG and SVG."""
    trials = [t for t in found["trials"] if "curve" in t]
    if not trials:
        return {}
    names = list(dict.fromkeys(t["strategy"] for t in trials if t["workers"] > 1))
    style = {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]} for i, name in enumerate(names)
    }
    style["one worker"] = {"color": "#777777", "marker": "."}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _gains(left, trials, names, style, target)
    _curves(right, trials, style, target)
    figure.suptitle(f"{found['recipe']} at {found['link']}, simulated", fontsize=11)
    drawn = {}
    for kind in ("png", "svg"):
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=144)
        drawn[kind] = out.getvalue()
    plt.close(figure)
    return drawn


def _gains(axes: Any, trials: Trials, names: list[str], style: dict[str, Any], target: Target | None) -> None:
    """Plots the speed-up over one worker; without a target, the ratio of rows a second."""
    sizes = sorted({t["workers"] for t in trials})
    axes.plot(sizes, sizes, color="#bbbbbb", linestyle="--", label="as many times as workers")
    alone = next((t for t in trials if t["workers"] == 1), None)
    for name in names:
        points = [(1, 1.0)] if alone else []
        for trial in trials:
            if trial["strategy"] == name:
                gain = trial.get("speedup") if target is not None else _throughput(trial, alone)
                if gain:
                    points.append((trial["workers"], gain))
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style[name])
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up over one worker" if target is not None else "rows a second over one worker's")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_yticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _throughput(trial: dict[str, Any], alone: dict[str, Any] | None) -> float | None:
    if alone is None or not trial["curve"] or not alone["curve"]:
        return None
    rates = [t["curve"][-1]["rows"] / t["train_seconds"] for t in (trial, alone)]
    return float(rates[0] / rates[1])


def _curves(axes: Any, trials: Trials, style: dict[str, Any], target: Target | None) -> None:
    metric = target.metric if target is not None else "val_loss"
    most = max(t["workers"] for t in trials)
    for trial in trials:
        if trial["workers"] in (1, most):
            points = [(row["seconds"], row[metric]) for row in trial["curve"] if metric in row]
            if points:
                look = style[trial["strategy"]] | {"markersize": 3}
                axes.plot(*zip(*points, strict=True), label=f"{trial['strategy']} ({trial['workers']})", **look)
    if target is not None:
        axes.axhline(target.value, color="#bbbbbb", linestyle="--")
    moments = [row["seconds"] for t in trials if t["workers"] in (1, most) for row in t["curve"]]
    if moments and max(moments) > 30 * max(min(moments), 1e-9):
        axes.set_xscale("log")
    axes.set_xlabel("seconds, virtual")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
