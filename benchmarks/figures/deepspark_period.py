"""DeepSpark's period as the loss falls, beside EASGD's: measured on the digits that come with thinwire.

    python benchmarks/figures/deepspark_period.py docs/images/deepspark.svg

Needs matplotlib. The figure on DeepSpark's card is made by it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire import events

WORKERS, EPOCHS, PERIOD = 3, 30, 4
COLOURS = {"DeepSpark": "#d55e00", "EASGD": "#0072b2"}
GREY = "#767676"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def train(strategy: tw.Strategy) -> tuple[dict[str, Any], list[tuple[int, float]], list[tuple[int, float]]]:
    """The summary; the loss, and the period, by step of the first worker."""
    rounds: list[events.RoundLanded] = []
    losses: list[tuple[int, float]] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.RoundLanded):
            rounds.append(event)
        elif isinstance(event, events.EpochEnded) and event.worker == 0 and event.loss is not None:
            losses.append((event.epoch + 1, event.loss))

    result = tw.fit(
        "cnn8",
        "digits",
        inputs=["pixels"],
        optimizer=sgd,
        strategy=strategy,
        cluster=tw.Local(workers=WORKERS),
        epochs=EPOCHS,
        batch_size=16,
        validation=0.2,
        callbacks=[watch],
        progress=False,
    )
    steps_each = result.summary["steps"] / EPOCHS
    periods = [(b.steps, (b.steps - a.steps) / (b.round - a.round)) for a, b in itertools.pairwise(rounds)]
    return result.summary, [(round(e * steps_each), loss) for e, loss in losses], periods


def draw(found: dict[str, Any], picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "thinwire", "text.color": GREY, "axes.edgecolor": GREY})
    plt.rcParams.update({"axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.linewidth": 0.8})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, (summary, losses, periods) in found.items():
        words = {"color": COLOURS[name], "fontweight": "bold", "textcoords": "offset points", "va": "center"}
        left.plot(*zip(*losses, strict=True), color=COLOURS[name], linewidth=2.2)
        left.annotate(name, losses[-1], (6, 6 if name == "DeepSpark" else -8), **words)
        right.step(*zip(*periods, strict=True), color=COLOURS[name], linewidth=2.2, where="pre")
        said = f"{name}: {summary['bytes_sent'] / 1e6:.1f} MB, {summary['val_accuracy']:.1%}"
        right.annotate(said, periods[-1], (-6, 10), ha="right", **words)
    left.set_yscale("log")
    left.set_ylabel("training loss of an epoch, log scale")
    right.set_yscale("log")
    right.set_ylabel("measured period, steps, log scale")
    for axes in (left, right):
        axes.set_xlabel("steps of the first worker")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
        axes.margins(x=0.12)
    title = f"digits, cnn8, {WORKERS} workers, first period {PERIOD}, one seed: bytes sent by all, validation accuracy"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(picture, transparent=True, metadata={"Date": None} if picture.endswith(".svg") else None)
    figure.savefig(Path(picture).with_suffix(".png"), transparent=True, dpi=130)


if __name__ == "__main__":
    found = {"DeepSpark": train(tw.DeepSpark(period=PERIOD)), "EASGD": train(tw.EASGD(period=PERIOD))}
    for name, (summary, losses, periods) in found.items():
        kept = {key: summary[key] for key in ("val_accuracy", "train_loss", "bytes_sent", "rounds", "steps")}
        print(
            name,
            kept,
            f"period {periods[0][1]:.0f} to {periods[-1][1]:.0f}, loss {losses[0][1]:.3f} to {losses[-1][1]:.4f}",
        )
    draw(found, sys.argv[1] if len(sys.argv) > 1 else "deepspark.svg")
