"""Where Relay breaks: more workers, other networks, uneven and failing ones; in virtual time, against a free wire.

python benchmarks/figures/stress.py measure --cifar DIR --text FILE --out stress.json [CASE …]
python benchmarks/figures/stress.py table benchmarks/results/stress.json
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.data.builtin import TEXT_LENGTH
from thinwire.models import model_by_name

STEP_S = 0.1


class CharTransformer(nn.Module):
    """Four causal layers of 128 units over 64 characters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(128, 128), nn.Parameter(0.02 * torch.randn(TEXT_LENGTH, 128))
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TEXT_LENGTH), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        seen = self.words(characters.long() % 128) + self.places
        found: Tensor = self.head(self.layers(seen, mask=self.mask, is_causal=True)).transpose(1, 2)
        return found


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


IMAGES = {"model": "resnet20", "data": "cifar", "optimizer": momentum, "batch_size": 32}
LSTM = {"model": "char_lstm", "data": "text", "optimizer": adam, "batch_size": 16}
WORDS = {"model": CharTransformer, "data": "text", "optimizer": adam, "batch_size": 16}
UNEVEN = {"slow": {0: 2.0, 3: 1.5}, "spread": 0.3}
FAILING = {
    "faults": tuple(tw.Fault(worker=w, at_s=a, seconds=5.0) for w, a in ((1, 10.0), (5, 20.0), (2, 30.0), (1, 40.0)))
}
CASES: dict[str, tuple[dict[str, Any], int, float, dict[str, Any]]] = {
    "8 workers": (IMAGES, 8, 16.0, {}),
    "16 workers": (IMAGES, 16, 16.0, {}),
    "32 workers": (IMAGES, 32, 16.0, {}),
    "64 workers": (IMAGES, 64, 16.0, {}),
    "uneven": (IMAGES, 8, 16.0, UNEVEN),
    "failing": (IMAGES, 8, 16.0, FAILING),
    "lstm": (LSTM, 8, 16.0, {}),
    "lstm, ratio 64": (LSTM, 8, 64.0, {}),
    "transformer": (WORDS, 8, 16.0, {}),
    "transformer, ratio 64": (WORDS, 8, 64.0, {}),
}
METHODS: dict[str, tw.Strategy] = {"free": tw.Synchronous(), "relay": tw.Relay(), "auto": tw.Auto(), "mpca": tw.MPCA()}


def trial(options: argparse.Namespace, case: str, method: str) -> dict[str, Any]:
    task, workers, ratio, more = CASES[case]
    model = model_by_name(task["model"]) if isinstance(task["model"], str) else task["model"]
    size = 4 * sum(p.numel() for p in model().parameters())
    link = 1e12 if method == "free" else 2 * size / (ratio * STEP_S)
    data = f"cifar10:{options.cifar}" if task["data"] == "cifar" else f"text:{options.text}"
    began = time.perf_counter()
    run = tw.fit(
        model,
        data,
        inputs=["pixels" if task["data"] == "cifar" else "characters"],
        validation=f"{data}?split=test",
        strategy=METHODS[method],
        cluster=tw.Simulated(workers=workers, link=link, step_s=STEP_S, **(more if method != "free" else {})),
        optimizer=task["optimizer"],
        scheduler=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=options.steps),
        scheduler_every="step",
        steps=options.steps,
        batch_size=task["batch_size"],
        evaluate_every=max(1, options.steps // 4),
        seed=options.seed,
        progress=False,
    )
    found: dict[str, Any] = {"case": case, "method": method, "workers": workers, "ratio": ratio, "seed": options.seed}
    names = ("steps", "rows", "train_seconds", "busy", "rounds", "val_loss", "val_accuracy", "workers_lost", "choice")
    found |= {name: run.summary.get(name) for name in names}
    found["real_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found), flush=True)
    return found


def measure(options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    head = {"date": datetime.date.today().isoformat(), "machine": f"{device}, torch {torch.__version__}"}
    found: dict[str, Any] = head | {"command": " ".join(["python", *sys.argv]), "steps": options.steps, "trials": []}
    for case in options.cases or CASES:
        for method in options.methods:
            found["trials"].append(trial(options, case, method))
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


def table(source: str) -> None:
    for one in json.loads(Path(source).read_text())["trials"]:
        score = f"{100 * one['val_accuracy']:.1f} %" if one["val_accuracy"] is not None else ""
        print(f"{one['case']:24}{one['method']:8}{score:>8}  loss {one['val_loss']:.4f}  busy {one['busy']:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        table(sys.argv[2])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("what", choices=["measure"])
        parser.add_argument("cases", nargs="*")
        parser.add_argument("--cifar")
        parser.add_argument("--text")
        parser.add_argument("--out", required=True)
        parser.add_argument("--steps", type=int, default=600)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--methods", nargs="+", default=["free", "relay"])
        measure(parser.parse_args())
