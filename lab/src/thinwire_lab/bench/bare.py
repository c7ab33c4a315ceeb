"""A plain PyTorch loop, and what it shares with thinwire in a comparison: models, data, optimizer, time stamps.

As a program (`python -m thinwire_lab.bench.bare`, with options on stdin) it is one side of a comparison: the loop that
a good user writes by hand, or the same training through a session. Both sides step until they are killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor, nn

from thinwire import events
from thinwire.models import lenet

SEED = 0
LR = 0.05
ROWS = 20_480
BATCH_SIZE = 64


def mlp() -> nn.Module:
    """The fully connected network 784-256-128-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


MODELS = {"mlp": mlp, "cnn": lenet}


def synthetic(rows: int) -> tuple[Tensor, Tensor]:
    """Random images in MNIST's shape, with random labels."""
    made = torch.Generator().manual_seed(SEED)
    return torch.rand(rows, 1, 28, 28, generator=made), torch.randint(10, (rows,), generator=made)


@dataclass(frozen=True)
class Marked:
    """An optimizer factory whose optimizers write the time of every step to a file of doubles, led by the count."""

    path: str

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=LR)
        marks = np.memmap(self.path, dtype=np.float64, mode="r+")
        done = 0

        def mark(*_: Any) -> None:
            nonlocal done
            done += 1
            if done < len(marks):
                marks[done] = time.perf_counter()
                marks[0] = done

        optimizer.register_step_post_hook(mark)
        return optimizer


def train(model: str, marked: Marked) -> None:
    """The training loop."""
    x, y = synthetic(ROWS)
    torch.manual_seed(SEED)
    net = MODELS[model]()
    optimizer = marked(net.parameters())
    while True:
        order = torch.randperm(ROWS)
        for start in range(0, ROWS, BATCH_SIZE):
            picked = order[start : start + BATCH_SIZE]
            inputs, labels = x.index_select(0, picked), y.index_select(0, picked)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()


def through_a_session(model: str, threads: int, marked: Marked) -> None:
    """The same training by one worker of a session."""
    from thinwire.cluster.local import Local
    from thinwire.run.session import fit

    def told(event: events.Event) -> None:
        if isinstance(event, events.WorkerJoined):
            print(event.pid, flush=True)

    x, y = synthetic(ROWS)
    fit(
        MODELS[model],
        {"pixels": x, "label": y},
        optimizer=marked,
        cluster=Local(workers=1, threads=threads),
        epochs=10**9,
        batch_size=BATCH_SIZE,
        callbacks=[told],
        progress=False,
    )


def main() -> None:
    """Reads the options, prints the process that steps, and trains until it is killed."""
    order = json.loads(sys.stdin.readline())
    marked = Marked(order["marks"])
    if order["session"]:
        through_a_session(order["model"], order["threads"], marked)
        return
    torch.set_num_threads(order["threads"])
    torch.set_num_interop_threads(1)
    print(os.getpid(), flush=True)
    train(order["model"], marked)


if __name__ == "__main__":
    main()
