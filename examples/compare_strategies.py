"""Every strategy on the same rows, seed and optimizer: what accuracy costs in bytes and in steps.

    python examples/compare_strategies.py                                 # a table; a picture too with matplotlib
    python examples/compare_strategies.py --picture docs/images/strategies.svg
    python examples/compare_strategies.py --epochs 3 --workers 2          # shorter

The periods are short because the run is: some hundred steps where the papers have tens of thousands.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

import torch

import thinwire as tw
from thinwire.events import Event, Progressed

STRATEGIES = {
    "Synchronous": tw.Synchronous(),
    "SparkNet": tw.SparkNet(period=10),
    "DiLoCo": tw.DiLoCo(period=20, momentum=0.5),
    "MPCA": tw.MPCA(),
    "Relay": tw.Relay(),
}
# Okabe and Ito's palette: told apart with any kind of colour vision, and readable on white and on black.
COLOURS = dict(zip(STRATEGIES, ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00"), strict=True))
GREY = "#7f858d"

Curve = list[tuple[int, float, float]]
"""Steps, bytes that all workers had sent by then, validation accuracy."""


class ByteCount:
    """Bytes sent by each worker at each step, from the run's progress events."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self.seen.setdefault(event.worker, [(0, 0)]).append((event.steps, event.bytes_sent))

    def at(self, steps: int) -> float:
        return sum(between(points, steps) for points in self.seen.values())


def between(points: list[tuple[int, int]], x: float) -> float:
    """The value at x on the line through the points, and on its last stretch beyond them."""
    points = sorted(dict(points).items())
    if len(points) == 1:
        return 0.0
    right = next((i for i in range(1, len(points)) if points[i][0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def train(strategy: tw.Strategy, workers: int, epochs: int) -> tuple[Curve, dict]:
    counted = ByteCount()
    result = tw.fit(
        "cnn8",
        "digits",
        inputs=["pixels"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        strategy=strategy,
        cluster=tw.Local(workers=workers),
        epochs=epochs,
        batch_size=16,
        validation=0.25,
        seed=0,
        callbacks=[counted],
        progress=False,
    )
    curve = [(row["steps"], counted.at(row["steps"]), row["val_accuracy"]) for row in result.history]
    curve[-1] = (curve[-1][0], float(result.summary["bytes_sent"]), curve[-1][2])
    return curve, result.summary


def spread(heights: list[float], gap: float) -> list[float]:
    """Heights for labels: the given ones, pushed apart until they are `gap` from each other."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    shift = max(0.0, max(placed) - max(heights))
    return [height - shift / 2 for height in placed]


def draw(curves: dict[str, Curve], title: str, picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "thinwire", "text.color": GREY, "axes.edgecolor": GREY})
    plt.rcParams.update({"axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.linewidth": 0.8})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    ends = spread([curve[-1][2] for curve in curves.values()], 0.012)
    by_bytes = sorted(curves, key=lambda name: curves[name][-1][1])
    for (name, curve), beside in zip(curves.items(), ends, strict=True):
        above = 1.006 + 0.013 * (len(by_bytes) - by_bytes.index(name))  # a ladder: no line crosses a name
        colour = COLOURS[name]
        for axes, column in ((left, 1), (right, 0)):
            x, y = [point[column] for point in curve], [point[2] for point in curve]
            axes.plot(x, y, color=colour, linewidth=2.2, solid_joinstyle="round")
            axes.plot(x[-1:], y[-1:], "o", color=colour, markersize=5)
        steps, sent, accuracy = curve[-1]
        words = {"color": colour, "fontweight": "bold"}
        left.plot([sent, sent], [accuracy, above], color=colour, linewidth=0.8)
        left.annotate(name, (sent, above), (4, 0), textcoords="offset points", va="center", **words)
        right.annotate(name, (steps, beside), (8, 0), textcoords="offset points", va="center", **words)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
        axes.spines["left"].set_bounds(0.8, 1.0)
        axes.set_ylim(0.8, 1.08)
        axes.set_yticks([0.8, 0.85, 0.9, 0.95, 1.0], ["80%", "85%", "90%", "95%", "100%"])
    left.set_xscale("log")
    left.set_ylabel("validation accuracy")
    left.set_xlabel("bytes sent by all workers, log scale")
    left.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(unit="B"))
    left.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    left.set_xlim(right=5 * max(curve[-1][1] for curve in curves.values()))
    right.set_xlabel("steps of each worker")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, transparent=True, metadata={"Date": None} if picture.endswith(".svg") else None)
    figure.savefig(Path(picture).with_suffix(".png"), transparent=True, dpi=130)
    print(f"wrote {picture} and its .png")


options = argparse.ArgumentParser(description="Compare the strategies on the digits that come with thinwire.")
options.add_argument("--workers", type=int, default=4)
options.add_argument("--epochs", type=int, default=20)
options.add_argument("--picture", default="strategies.svg")
chosen = options.parse_args()

print(f"{'strategy':<12} {'accuracy':>8} {'steps':>6} {'rounds':>7} {'bytes sent':>12} {'busy':>5}")
found: dict[str, Curve] = {}
for name, strategy in STRATEGIES.items():
    found[name], summary = train(strategy, chosen.workers, chosen.epochs)
    accuracy, busy = f"{summary['val_accuracy']:.1%}", f"{summary['busy']:.0%}"
    print(
        f"{name:<12} {accuracy:>8} {summary['steps']:>6} {summary['rounds']:>7} {summary['bytes_sent']:>12,} {busy:>5}"
    )
try:
    draw(found, f"digits, cnn8 (22,698 parameters), {chosen.workers} workers on one machine, one seed", chosen.picture)
except ImportError:
    print("no picture: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
