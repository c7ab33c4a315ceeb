"""A placed replica on a GPU against the same on the CPU, as a script for a machine that has one: members share it."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from typing import Any

import torch
from torch import nn


def member(part: int, size: int, port: int, device: str, results: Any) -> None:
    from thinwire.placement import Crew, Planned, TensorParallel, part_of
    from thinwire.replicas import TrainSpec

    crew = Crew(part, size, port=port)
    crew.form(crew.address if part == 0 else f"127.0.0.1:{port}", "test", 60.0)
    losses = []
    for placement in (TensorParallel(group_size=size), Planned(group_size=size)):
        spec = TrainSpec(loss="cross_entropy", optimizer=functools.partial(torch.optim.SGD, lr=0.1), device=device)
        torch.manual_seed(part)
        rows, labels = torch.randn(8, 3, 12, 12), torch.randint(0, 5, (8,))

        class Rows:
            num_rows, weight = 8, None
            inputs = (rows.to(device),)
            label = labels.to(device)

        batch = Rows()
        made = part_of(placement, network, spec, part, crew=crew, examples=list(batch.inputs), rows=8)
        made.stand_in(batch)
        for _ in range(3):
            losses.append(made.gradient(batch))
            made.update()
        losses.append(made.evaluate([batch], made.vector.clone(), {})[0]["val_loss"])
    results.put((part, losses))
    crew.tell([0.0])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 5)
    )


def run(device: str, port: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = [context.Process(target=member, args=(part, 2, port, device, results)) for part in range(2)]
    for each in members:
        each.start()
    found = dict(results.get(timeout=120) for _ in members)
    for each in members:
        each.join(20)
    return [found[0], found[1]]


if __name__ == "__main__":
    here, there = run("cpu", 29871), run("cuda", 29872)
    off = max(abs(a - b) for one, other in zip(here, there, strict=True) for a, b in zip(one, other, strict=True))
    print("largest difference", off)
    sys.exit(off > 1e-3)
