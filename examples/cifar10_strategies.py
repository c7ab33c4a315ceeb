"""Images by four strategies on a slow link: accuracy over time, with a picture.

    python examples/cifar10_strategies.py --data cifar10:DIR --steps 600     # a folder with CIFAR-10's binary files
    python examples/cifar10_strategies.py                                    # the digits that come with thinwire

In virtual time: the gradients are real, the link and the clock are not, so one machine can be four.
"""

import argparse
import sys

import torch

import thinwire as tw

options = argparse.ArgumentParser(description="Compare four strategies on images where an exchange takes many steps.")
options.add_argument("--data", default="digits")
options.add_argument("--ratio", type=float, default=12.0, help="steps that one exchange of the model takes")
options.add_argument("--workers", type=int, default=4)
options.add_argument("--steps", type=int, default=120)
options.add_argument("--picture", default="images.svg")
chosen = options.parse_args()

cifar = chosen.data.startswith("cifar10:")
STRATEGIES = {
    "Synchronous": (tw.Synchronous(), "#E69F00"),
    "SparkNet": (tw.SparkNet(period=round(5 * chosen.ratio)), "#56B4E9"),
    "MPCA": (tw.MPCA(), "#009E73"),
    "Relay": (tw.Relay(), "#D55E00"),
}
curves = {}
for name, (strategy, _) in STRATEGIES.items():
    run = tw.fit(
        "three_convolutions" if cifar else "cnn8",
        chosen.data,
        inputs=["pixels"],
        validation=f"{chosen.data}?split=test" if cifar else 0.25,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01 if cifar else 0.03, momentum=0.9),
        strategy=strategy,
        cluster=tw.Simulated(workers=chosen.workers, ratio=chosen.ratio),
        steps=chosen.steps,
        batch_size=16,
        evaluate_every=max(1, chosen.steps // 12),
        seed=0,
        progress=False,
    )
    curves[name] = [(row["seconds"], row["val_accuracy"]) for row in run.history]
    print(f"{name:12} {run.summary['val_accuracy']:6.1%} after {run.summary['train_seconds']:8.1f} s", flush=True)

try:
    import matplotlib
except ImportError:
    sys.exit(print("no picture: it needs matplotlib (pip install matplotlib)"))
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
for name, curve in curves.items():
    axes.plot(*zip(*curve, strict=True), color=STRATEGIES[name][1], marker="o", markersize=3, label=name)
axes.set_xscale("log")
axes.set_xlabel(f"seconds on a link where an exchange takes {chosen.ratio:g} steps, log scale")
axes.set_ylabel("validation accuracy")
axes.legend()
figure.savefig(chosen.picture)
print(f"wrote {chosen.picture}")
