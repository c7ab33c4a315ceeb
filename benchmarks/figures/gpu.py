"""Steps per second on a GPU with an exchange going on beside them, against none.

    python benchmarks/figures/gpu.py [ROUNDS [METHOD …]] > benchmarks/results/gpu.json

Two workers share the device, each with a replica of a wide network; the exchange is the real one, over loopback.
Without an exchange is SparkNet with a period that never comes.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import thinwire as tw
from thinwire import events

WIDTH, LAYERS, BATCH, STEPS = 3072, 5, 1024, 500
METHODS: dict[str, tw.Strategy] = {
    "none": tw.SparkNet(period=10**9),
    "relay": tw.Relay(),
    "mpca": tw.MPCA(),
    "sparknet": tw.SparkNet(period=50),
}


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def measure(name: str, data: dict[str, Any]) -> dict[str, Any]:
    seen: list[tuple[int, float]] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Progressed) and event.worker == 0:
            seen.append((event.steps, event.time))

    result = tw.fit(
        network, data, inputs=["x"], batch_size=BATCH, steps=STEPS, strategy=METHODS[name], device="cuda",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), cluster=tw.Local(workers=2, threads=4),
        callbacks=[watch], progress=False,
    )  # fmt: skip
    late = [point for point in seen if point[0] >= STEPS // 3]
    rate = (late[-1][0] - late[0][0]) / (late[-1][1] - late[0][1])
    told = {key: result.summary[key] for key in ("rounds", "bytes_sent", "choice")}
    return {"steps_per_s": round(rate, 2), "parameters": sum(p.numel() for p in result.model.parameters()), **told}


if __name__ == "__main__":
    made = np.random.default_rng(0)
    rows = {"x": made.normal(size=(65536, 64)).astype(np.float32), "label": made.integers(0, 10, 65536)}
    wanted = sys.argv[2:] or list(METHODS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
        for name in wanted:
            found[name].append(measure(name, rows))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    free = statistics.median(r["steps_per_s"] for r in found["none"])
    shares = {n: round(statistics.median(r["steps_per_s"] for r in runs) / free, 3) for n, runs in found.items()}
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{torch.cuda.get_device_name()}, {torch.__version__}",
    }
    print(json.dumps(head | {"of_the_steps_without": shares, "measured": found}, indent=1))
