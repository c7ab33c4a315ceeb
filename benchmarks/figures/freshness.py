"""Bits against fragments for Relay's rounds: a sketch of the method beside the product, for one GPU.

    python benchmarks/figures/freshness.py benchmarks/results/freshness.json

Replicas of three seeds go through one batched product, so that a run of 1,000 steps takes two seconds on an H200. A
round takes the whole steps that its bytes need; nothing else takes time. Rows are drawn from a network of random
weights, with a tenth of the labels drawn anew, and none is seen twice. The network has 223,000 parameters; rates fall
by a cosine after a warm-up of a twentieth. `benchmarks/figures/bits.py` runs such cases through the product itself.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

STEPS, SEEDS, BLOCK = 1000, 3, 256
SHAPES = ((64, 384), (384,), (384, 384), (384,), (384, 128), (128,), (128, 10), (10,))
SIZES = [math.prod(shape) for shape in SHAPES]
SIZE = sum(SIZES)
GRID = ((4, (8, 4, 2, 1)), (10, (8, 4, 2, 1)), (16, (4, 2, 1)), (28, (4, 2, 1)), (64, (4, 2, 1)), (200, (4, 2, 1)))


class Case(NamedTuple):
    optimizer: str
    batch: int
    workers: int
    ratio: float = 0.0
    bits: int = 0
    fragments: int = 0
    """None: free communication."""


class Rows:
    """Drawn by one generator, labelled by one network."""

    def __init__(self, device: str) -> None:
        self.chance = torch.Generator(device).manual_seed(0)
        self.device = device
        shapes = ((64, 96), (96, 96), (96, 10))
        self.layers = [self.normal(a, b) * (2 / a) ** 0.5 for a, b in shapes]
        self.held = self.some(20_000)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance, device=self.device)

    def some(self, count: int) -> tuple[Tensor, Tensor]:
        x = self.normal(count, 64)
        label = (((x @ self.layers[0]).relu() @ self.layers[1]).relu() @ self.layers[2]).argmax(1)
        noisy = torch.rand(count, generator=self.chance, device=self.device) < 0.1
        return x, torch.where(noisy, torch.randint(10, (count,), generator=self.chance, device=self.device), label)


def forward(parameters: Tensor, x: Tensor) -> Tensor:
    pieces = parameters.split(SIZES, 1)
    for layer in range(0, 8, 2):
        x = torch.baddbmm(pieces[layer + 1][:, None], x, pieces[layer].unflatten(1, SHAPES[layer]))
        x = x.relu() if layer < 6 else x
    return x


def packed(values: Tensor, bits: int) -> Tensor:
    """What is left of values once they were sent."""
    count = values.shape[-1]
    block = functional.pad(values, (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
    size = block.abs()
    if bits == 1:
        found = block.sign() * size.mean(-1, True)
    elif bits == 2:
        past = size > 1.23 * size.mean(-1, True)
        low, high = ((size * side).sum(-1, True) / side.sum(-1, True).clamp_min(1) for side in (~past, past))
        found = block.sign() * torch.where(past, high, low)
    else:
        scale = size.amax(-1, True).clamp_min(1e-20) / (2 ** (bits - 1) - 1)
        found = (block / scale).round() * scale
    return found.flatten(-2)[..., :count]


class Relayed:
    """The joint model, and one fragment under way."""

    def __init__(self, case: Case, joint: Tensor) -> None:
        self.case, self.joint = case, joint
        self.own = joint.new_zeros(SEEDS, case.workers, SIZE)
        self.owed, self.moving = torch.zeros_like(joint), torch.zeros_like(joint)
        self.cuts = [SIZE * j // case.fragments for j in range(case.fragments + 1)]
        self.takes = max(1, math.ceil(case.ratio * (case.bits + 1 / 8) / 32 / case.fragments + 0.05))
        self.momentum = 0.3 if case.fragments * self.takes >= 8 and case.workers >= 8 else 0.0
        self.flight: tuple[int, int, int, Tensor, Tensor] | None = None
        self.next = 0

    def step(self, now: int, x: Tensor) -> None:
        if self.flight is not None:
            due, start, stop, snapshot, sent = self.flight
            if now < due:
                return
            part = slice(start, stop)
            mean = sent.mean(1) + self.owed[:, part]
            reply = packed(mean, self.case.bits)
            self.owed[:, part] = mean - reply
            self.moving[:, part] = self.momentum * self.moving[:, part] + reply
            self.joint[:, part] -= reply + self.momentum * self.moving[:, part]
            x[:, :, part] += self.joint[:, None, part] - snapshot
        part = slice(self.cuts[self.next], self.cuts[self.next + 1])
        snapshot = x[:, :, part].clone()
        given = self.joint[:, None, part] - snapshot + self.own[:, :, part]
        sent = packed(given, self.case.bits)
        self.own[:, :, part] = given - sent
        self.flight = now + self.takes, part.start, part.stop, snapshot, sent
        self.next = (self.next + 1) % self.case.fragments


def run(case: Case, device: str) -> dict[str, Any]:
    """Held-out loss of each seed, and accuracy, of the mean of the replicas."""
    rows = Rows(device)
    rows.chance.manual_seed(1)
    first = [
        rows.normal(SEEDS, size) * ((2 / shape[0]) ** 0.5 if len(shape) > 1 else 0.0)
        for size, shape in zip(SIZES, SHAPES, strict=True)
    ]
    joint = torch.cat(first, 1)
    x = joint[:, None].repeat(1, case.workers, 1)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    relayed = Relayed(case, joint.clone()) if case.fragments else None
    for step in range(STEPS):
        g = gradients(x, case, rows)
        if relayed is None:
            g = g.mean(1, True).expand_as(x)
        done = step / STEPS
        rate = done / 0.05 if done < 0.05 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.05) / 0.95)
        if case.optimizer == "momentum":
            m.mul_(0.9).add_(g)
            x.sub_(0.1 * rate * (g + 0.9 * m))
        else:
            m.lerp_(g, 0.1)
            v.lerp_(g * g, 0.001)
            size = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            x.sub_(0.002 * rate * (m / (1 - 0.9 ** (step + 1)) / size + 0.01 * x))
        if relayed is not None:
            relayed.step(step, x)
    scores = forward(x.mean(1), rows.held[0].expand(SEEDS, -1, -1))
    losses = [round(functional.cross_entropy(each, rows.held[1]).item(), 4) for each in scores]
    accuracy = (scores.argmax(-1) == rows.held[1]).float().mean().item()
    takes, momentum = (relayed.takes, relayed.momentum) if relayed is not None else (0, 0.0)
    return case._asdict() | {"takes": takes, "momentum": momentum, "losses": losses, "accuracy": round(accuracy, 4)}


def gradients(x: Tensor, case: Case, rows: Rows) -> Tensor:
    batch, label = rows.some(SEEDS * case.workers * case.batch)
    leaf = x.view(SEEDS * case.workers, SIZE).detach().requires_grad_()
    scores = forward(leaf, batch.view(SEEDS * case.workers, case.batch, 64)).flatten(0, 1)
    (found,) = torch.autograd.grad(functional.cross_entropy(scores, label) * SEEDS * case.workers, leaf)
    return found.view_as(x)


def cases() -> Sequence[Case]:
    found = []
    for optimizer, batch, workers in (("momentum", 16, 8), ("adamw", 16, 8), ("momentum", 64, 8), ("momentum", 16, 32)):
        found.append(Case(optimizer, batch, workers))
        for ratio, choice in GRID:
            for bits in choice:
                fragments = max(1, math.ceil(ratio * (bits + 1 / 8) / 32 / 0.95))
                found.append(Case(optimizer, batch, workers, ratio, bits, fragments))
    return found


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    runs = []
    for case in cases():
        runs.append(run(case, where))
        print(json.dumps(runs[-1]), flush=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = torch.cuda.get_device_name() if where == "cuda" else "processor"
    told = {"name": "freshness", "date": date, "command": " ".join(sys.argv), "machine": machine, "runs": runs}
    with open(sys.argv[1], "w") as file:
        file.write(json.dumps(told, indent=1) + "\n")
