"""What methods reach in the same time on slower and slower links: MPCA's Table 2 (Langer et al. 2018), in virtual time.

    python benchmarks/figures/ratios.py measure --data cifar10:DIR --jobs 8 --out benchmarks/results/ratios.json
    python benchmarks/figures/ratios.py draw benchmarks/results/ratios.json docs/images/ratios.svg

Every method has the time of `--steps` steps; a method that waits makes fewer. A ratio is the number of steps that one
exchange of the whole model takes: 11.6, 15.7, 29.2 and 107.8 are MPCA's for ResNet-110, ResNet-34, ResNet-152 and VGG-A
at a gigabit. The speed-up of a method is the time that one worker needs to come as far, over the time it took: one
worker is trained for several lengths of time, each with a schedule that fits, and the rest is read off between them.
With `--augment` images are moved by up to four pixels and mirrored at random, as the paper does; without, eight workers
have learnt the set by heart before one worker has seen enough of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from saving import save

import thinwire as tw
from thinwire.rules.period import balanced_period
from thinwire.rules.speedup import busy_share
from thinwire.strategies import strategy

STEP_S, WORKERS = 0.1, 8
RATIOS = (11.6, 15.7, 29.2, 64.0, 107.8)
LENGTHS = (1, 2, 4, 8)
MOST_MOVED = 4
COLOURS = {"relay": "#d55e00", "mpca": "#009e73", "sparknet": "#0072b2", "easgd": "#cc79a7", "free": "#767676"}


def knobs_of(method: str, ratio: float) -> dict[str, Any]:
    """As the papers set them: SparkNet's period by the rule of 1 to 5, EASGD's 30 % above what its wire can do."""
    if method == "sparknet":
        return {"period": balanced_period(ratio * STEP_S, STEP_S)}
    if method == "easgd":
        return {"period": max(1, round(1.3 * ratio))}
    return {}


def trial(options: argparse.Namespace, method: str, ratio: float | None, workers: int, steps: int) -> dict[str, Any]:
    """One run; without a ratio communication is free."""
    knobs = knobs_of(method, ratio or 1.0)
    if method == "sparknet":
        steps = round(steps * busy_share(knobs["period"], STEP_S, (ratio or 0.0) * STEP_S))
    size = 4 * sum(p.numel() for p in tw_model(options.model).parameters())
    link = 1e12 if ratio is None else 2 * size / (ratio * STEP_S)
    began = time.perf_counter()
    run = tw.fit(
        functools.partial(augmented, options.model) if options.augment else options.model,
        options.data,
        inputs=["pixels"],
        validation=f"{options.data}?split=test" if options.data.startswith("cifar10:") else 0.2,
        strategy=strategy("synchronous" if method == "free" else method, knobs),
        cluster=tw.Simulated(workers=workers, link=link, step_s=STEP_S),
        optimizer=functools.partial(torch.optim.SGD, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
        scheduler=functools.partial(annealed, steps=steps, warm=options.warmup),
        scheduler_every="step",
        steps=steps,
        batch_size=options.batch_size,
        precision=options.precision,
        evaluate_every=max(1, steps // 8),
        seed=options.seed,
        progress=False,
    )
    found = {"method": method, "ratio": ratio, "workers": workers, "knobs": knobs, "seed": options.seed}
    found |= {name: run.summary[name] for name in ("steps", "train_seconds", "busy", "rounds", "bytes_sent")}
    found["accuracy"] = run.summary["val_accuracy"]
    found["curve"] = [[row["seconds"], row["val_accuracy"]] for row in run.history]
    found["real_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps({k: v for k, v in found.items() if k != "curve"}), flush=True)
    return found


def annealed(optimizer: torch.optim.Optimizer, steps: int, warm: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that falls as a cosine does, after it has risen for so many steps."""
    rate = lambda k: min(1.0, (k + 1) / (warm + 1)) * (1 + math.cos(math.pi * min(k, steps) / steps)) / 2  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Augmented(torch.nn.Module):
    """A network that sees each training image moved and mirrored at random, all of it on the device."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(_moved(x) if self.training else x)
        return found


def _moved(x: torch.Tensor) -> torch.Tensor:
    """Each image moved by up to `MOST_MOVED` pixels, zeros coming in, and mirrored or not."""
    images, size = x.shape[0], x.shape[-1]
    right, down = torch.randint(-MOST_MOVED, MOST_MOVED + 1, (2, images, 1), device=x.device)
    along = torch.arange(size, device=x.device)
    mirrored = torch.rand(images, 1, device=x.device) < 0.5
    columns = torch.where(mirrored, size - 1 - along, along) + right
    rows = along + down
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    flat = rows.clamp(0, size - 1)[:, :, None] * size + columns.clamp(0, size - 1)[:, None, :]
    picked = x.flatten(-2).gather(-1, flat.flatten(1)[:, None, :].expand(-1, x.shape[1], -1))
    return picked.view_as(x) * inside[:, None]


def augmented(name: str) -> torch.nn.Module:
    return Augmented(tw_model(name))


def tw_model(name: str) -> torch.nn.Module:
    from thinwire.models import model_by_name

    return model_by_name(name)()


def measure(options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{device}, torch {torch.__version__}",
        "command": " ".join(["python", *sys.argv]),
        "model": options.model,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "step_s": STEP_S,
        "lr": options.lr,
        "augmented": options.augment,
        "warmup": options.warmup,
        "trials": [],
    }
    if options.add and Path(options.out).exists():
        before = json.loads(Path(options.out).read_text())
        before = {"augmented": False, "warmup": 0} | before
        fixed = ("model", "steps", "batch_size", "lr", "augmented", "warmup")
        if others := [name for name in fixed if before.get(name) != found[name]]:
            sys.exit(f"the trials in {options.out} have other {', '.join(others)}; write elsewhere")
        found["trials"] = before["trials"]
    wanted: list[tuple[str, float | None, int, int]] = []
    if "alone" in options.methods:
        wanted += [("free", None, 1, length * options.steps) for length in LENGTHS]
    if "free" in options.methods:
        wanted.append(("free", None, WORKERS, options.steps))
    for method in options.methods:
        if method not in ("alone", "free"):
            wanted += [(method, ratio, WORKERS, options.steps) for ratio in options.ratios]
    wanted.sort(key=lambda one: one[2] * one[3], reverse=True)  # the longest first
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        trials = [pool.submit(trial, options, *one) for one in wanted]
        for done in concurrent.futures.as_completed(trials):
            if done.exception() is None:  # the others are worth having all the same
                found["trials"].append(done.result())
                Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    for done in trials:
        done.result()


def speedup(found: dict[str, Any], one: dict[str, Any]) -> float | None:
    """The time in which one worker comes as far, over the time this took; None where it never did."""
    alone = sorted((t["train_seconds"], t["accuracy"]) for t in found["trials"] if t["workers"] == 1)
    if not alone or one["accuracy"] > alone[-1][1]:
        return None
    earlier = (0.0, 0.1)
    for seconds, accuracy in alone:
        if accuracy >= one["accuracy"]:
            share = (one["accuracy"] - earlier[1]) / max(1e-9, accuracy - earlier[1])
            return float((earlier[0] + share * (seconds - earlier[0])) / (found["steps"] * STEP_S))
        earlier = (seconds, accuracy)
    return None


def draw(source: str, picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = json.loads(Path(source).read_text())
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for method, colour in COLOURS.items():
        mine = [t for t in found["trials"] if t["method"] == method and t["ratio"]]
        points = [
            (ratio, 100 * statistics.mean(t["accuracy"] for t in mine if t["ratio"] == ratio))
            for ratio in {t["ratio"] for t in mine}
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, label=method)
    for workers, name in ((1, "one worker"), (WORKERS, f"{WORKERS} workers, free communication")):
        free = [
            t for t in found["trials"] if t["ratio"] is None and (t["workers"], t["steps"]) == (workers, found["steps"])
        ]
        if free:
            height = 100 * statistics.mean(t["accuracy"] for t in free)
            axes.axhline(height, color="#767676", linestyle="--", linewidth=1)
            axes.annotate(name, (17, height), fontsize=8, va="bottom", color="#767676")
    axes.margins(y=0.1)
    axes.set_xscale("log")
    axes.set_xticks(RATIOS, [f"{r:g}" for r in RATIOS])
    axes.minorticks_off()
    axes.set_xlabel("steps that one exchange of the whole model takes")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"{found['model']} on CIFAR-10, {WORKERS} workers, the time of {found['steps']} steps", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(dest="act", required=True)
    measuring = acts.add_parser("measure")
    measuring.add_argument("--data", required=True)
    measuring.add_argument("--out", required=True)
    measuring.add_argument("--model", default="resnet20")
    measuring.add_argument("--methods", nargs="+", default=["alone", "free", "relay", "mpca", "sparknet", "easgd"])
    measuring.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    measuring.add_argument("--steps", type=int, default=1500)
    measuring.add_argument("--batch-size", type=int, default=64)
    measuring.add_argument("--lr", type=float, default=0.1)
    measuring.add_argument("--precision", default="float32")
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--augment", action="store_true", help="move and mirror training images at random")
    measuring.add_argument("--warmup", type=int, default=0, help="steps in which the rate rises, before it falls")
    measuring.add_argument("--jobs", type=int, default=1, help="trials at a time, a process each")
    measuring.add_argument("--add", action="store_true", help="to what is in the file")
    drawing = acts.add_parser("draw")
    drawing.add_argument("source")
    drawing.add_argument("picture")
    options = parser.parse_args()
    if options.act == "measure":
        measure(options)
    else:
        draw(options.source, options.picture)
        found = json.loads(Path(options.source).read_text())
        for one in found["trials"]:
            gain = speedup(found, one)
            shown = "beyond" if gain is None else f"{gain:.2f}"
            who = f"{one['method']:10} K={one['workers']} R={one['ratio']}"
            print(f"{who} accuracy {one['accuracy']:.4f} speed-up {shown}")


if __name__ == "__main__":
    main()
