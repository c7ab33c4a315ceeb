"""The mean length of gradients by epoch, which goes to zero as the error does (Shrivastava et al. 2017, first figures).

python benchmarks/figures/gradients.py           # runs in virtual time, and draws
python benchmarks/figures/gradients.py --missing # runs what is not in the results yet
python benchmarks/figures/gradients.py --draw    # draws what was run
"""

import json
import sys
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path

import matplotlib
import torch

import thinwire as tw
from thinwire.events import EpochEnded

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gradients.json"
EPOCHS, WORKERS = 20, 4
STRATEGIES = {
    "one worker": (1, None, 0.02),
    "synchronous": (WORKERS, tw.Synchronous(), 0.02),
    "relay": (WORKERS, tw.Relay(), 0.02),
    "parameter table, delayed": (WORKERS, tw.ParameterTable(ahead=1), 0.02),
    "parameter table, delayed, a quarter of the rate": (WORKERS, tw.ParameterTable(ahead=1), 0.005),
}


def trained(workers: int, strategy: tw.Strategy | None, rate: float) -> list[dict[str, float]]:
    """By epoch, the mean over workers of the length of gradients, and of the training loss."""
    told: dict[int, list[EpochEnded]] = defaultdict(list)

    def listen(event: object) -> None:
        if isinstance(event, EpochEnded):
            told[event.epoch].append(event)

    tw.fit(
        "cnn8",
        "digits",
        inputs=["pixels"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        strategy=strategy,
        cluster=tw.Simulated(workers=workers, step_s=0.05, link="1gbit"),
        epochs=EPOCHS,
        batch_size=64 // workers,
        callbacks=[listen],
        progress=False,
    )
    return [
        {
            "epoch": epoch + 1,
            "gradient_norm": sum(e.gradient_norm or 0.0 for e in ended) / len(ended),
            "loss": sum(e.loss or 0.0 for e in ended) / len(ended),
        }
        for epoch, ended in sorted(told.items())
    ]


def draw(found: dict[str, list[dict[str, float]]]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, what, label in zip(
        axes, ("gradient_norm", "loss"), ("mean length of gradients", "training loss"), strict=True
    ):
        for name, rows in found.items():
            axis.plot([row["epoch"] for row in rows], [row[what] for row in rows], label=name, linewidth=1.2)
        axis.set_xlabel("epochs")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    for kind in ("png", "svg"):
        figure.savefig(ROOT / "docs" / "images" / f"gradients.{kind}", dpi=144, metadata=None)
    plt.close(figure)


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        known = json.loads(RESULT.read_text())["curves"] if "--missing" in sys.argv else {}
        curves = {name: known.get(name) or trained(*each) for name, each in STRATEGIES.items()}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        RESULT.write_text(
            json.dumps({"date": now, "epochs": EPOCHS, "workers": WORKERS, "curves": curves}, indent=1) + "\n"
        )
    draw(json.loads(RESULT.read_text())["curves"])
