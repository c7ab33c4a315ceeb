"""A plain PyTorch loop, and what it has in common with ours in a comparison: models, data, optimizer, stopwatch.

As a program (`python -m thinwire.bench.bare`, its order on stdin) it is the loop that a good user writes by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor, nn

from thinwire.models import lenet

SEED = 0
LR = 0.05


def mlp() -> nn.Module:
    """784-256-128-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


MODELS = {"mlp": mlp, "cnn": lenet}


def synthetic(rows: int) -> tuple[Tensor, Tensor]:
    """Noise in MNIST's shape with labels."""
    made = torch.Generator().manual_seed(SEED)
    return torch.rand(rows, 1, 28, 28, generator=made), torch.randint(10, (rows,), generator=made)


@dataclass(frozen=True)
class Stopwatch:
    """An optimizer factory whose optimizer times itself from one step to another, and leaves the seconds in a file."""

    path: str
    first: int
    last: int

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=LR)
        done, began, spent = 0, 0.0, 0.0

        def count(*_: Any) -> None:
            nonlocal done, began, spent
            done += 1
            if done == self.first:
                began, spent = time.perf_counter(), time.process_time()
            elif done == self.last:
                found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - spent}
                with open(self.path + ".partial", "w") as file:
                    json.dump(found | {"steps": self.last - self.first}, file)
                os.replace(self.path + ".partial", self.path)

        optimizer.register_step_post_hook(count)
        return optimizer


def train(model: str, rows: int, batch_size: int, steps: int, stopwatch: Stopwatch) -> None:
    """The loop."""
    x, y = synthetic(rows)
    torch.manual_seed(SEED)
    net = MODELS[model]()
    optimizer = stopwatch(net.parameters())
    done = 0
    while True:
        order = torch.randperm(rows)
        for start in range(0, rows, batch_size):
            picked = order[start : start + batch_size]
            inputs, labels = x.index_select(0, picked), y.index_select(0, picked)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
            done += 1
            if done >= steps:
                return


def main() -> None:
    """Reads the order and runs the loop."""
    order = json.loads(sys.stdin.readline())
    torch.set_num_threads(order["threads"])
    torch.set_num_interop_threads(1)
    watch = Stopwatch(*order["stopwatch"])
    train(order["model"], order["rows"], order["batch_size"], order["steps"], watch)


if __name__ == "__main__":
    main()
