"""The task of `bench comparison`: network, rows, steps and pace that all methods share; and torch's own methods.

A step takes a fixed time, as on an accelerator: the forward and backward pass of each layer, and the update, end only
after their share of that time. The real computation happens within this time, and so does an all-reduce that starts
with the first gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.data import open_source

ONE_BUCKET_MB = 256
FORWARD, BACKWARD = 0.3, 0.6
"""Shares of a step that the forward and backward passes take; the update takes the rest."""
HELD = 600
"""Most validation rows: thinwire's clock goes on during evaluations."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """One comparison: network, data, number of steps, and target."""

    width: int
    step_s: float
    rate: str
    ratio: float
    """Number of steps in whose time the whole float32 model crosses a link and back."""
    steps: int = 500
    batch: int = 8
    lr: float = 0.03
    momentum: float = 0.9
    target: float = 0.0
    """Validation loss to reach."""
    every: int = 10
    """Steps between evaluations."""
    seed: int = 1
    rows: str = ""
    """The file that `prepare` has written."""
    inputs: int = 64

    def model(self) -> nn.Module:
        """The network with paced steps."""
        torch.manual_seed(self.seed)
        return PacedNet(self.inputs, self.width, self.step_s)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return PacedSGD(parameters, lr=self.lr, momentum=self.momentum)

    def load(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training rows and validation rows."""
        with np.load(self.rows) as saved:
            x, y, held_x, held_y = (torch.from_numpy(saved[name]) for name in ("x", "y", "held_x", "held_y"))
        return (x, y), (held_x, held_y)


def prepare(source: str, path: str, most: int = 22_000) -> int:
    """Writes a set's first rows in random order, with large images halved; returns the number of inputs."""
    batches = list(open_source(source).batches())
    column = next(name for name in batches[0].schema.names if name != "label")
    pixels = np.concatenate([b.column(column).to_numpy_ndarray() for b in batches])[:most]
    labels = np.concatenate([b.column("label").to_numpy(zero_copy_only=False) for b in batches])[:most]
    x = torch.from_numpy(pixels).float()
    x = x / x.max()
    if x[0].numel() > 256:
        x = nn.functional.avg_pool2d(x.reshape(len(x), 1, *x.shape[-2:]), 2)
    x, y = x.flatten(1), torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held = min(HELD, len(y) // 5)
    pixels, labels = x[order].numpy(), y[order].numpy()
    np.savez(path, x=pixels[held:], y=labels[held:], held_x=pixels[:held], held_y=labels[:held])
    return int(pixels.shape[1])


def reference_loss(race: Race, workers: int) -> float:
    """The loss of plain SGD after half of the steps, with another seed: the target, fixed before the comparison."""
    return plain_loss(replace(race, steps=race.steps // 2, seed=race.seed + 1000), workers)


def plain_loss(race: Race, workers: int) -> float:
    """The loss of plain SGD with all workers' rows in one batch: the mean of the last five evaluations."""
    alone = replace(race, step_s=0.0, batch=race.batch * workers)
    return float(np.mean([row["val_loss"] for row in train_torch(alone, "one")["history"][-5:]]))


class _Until(torch.autograd.Function):
    """Delays values until one moment, and their gradients until another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_at: float, backward_at: float) -> Tensor:
        ctx.backward_at = backward_at
        _sleep_until(forward_at)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep_until(ctx.backward_at)
        return gradient, None, None


def _until(values: Tensor, forward_at: float, backward_at: float) -> Tensor:
    passed: Tensor = _Until.apply(values, forward_at, backward_at)  # type: ignore[no-untyped-call]
    return passed


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class Pace:
    """The end of the present step; a process trains one network."""

    until = 0.0


class PacedSGD(torch.optim.SGD):
    """SGD whose update ends only when the step's time is over."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        _sleep_until(Pace.until)
        return loss


class PacedNet(nn.Module):
    """Three fully connected layers; a training step takes `step_s`, divided by parameters."""

    def __init__(self, inputs: int, width: int, step_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, 10)])
        self.step_s = step_s

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        began = time.perf_counter()
        sizes = [layer.weight.numel() for layer in self.layers]  # type: ignore[operator]
        done = 0
        if self.training:
            Pace.until = began + self.step_s
        for number, layer in enumerate(self.layers):
            done += sizes[number]
            x = layer(x)
            if self.training:
                back = 1 - (done - sizes[number]) / sum(sizes)  # share of the backward pass up to this layer's gradient
                forward_at = began + self.step_s * FORWARD * done / sum(sizes)
                x = _until(x, forward_at, began + self.step_s * (FORWARD + BACKWARD * back))
            if number < 2:
                x = torch.relu(x)
        return x


def batches(x: Tensor, y: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches, in a new order each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y) - size + 1, size):
            chosen = order[start : start + size]
            yield x[chosen], y[chosen]


def train_torch(race: Race, kind: str) -> dict[str, Any]:
    """One process of torch's own data parallelism: plain, with a hook, or local SGD; `one` is a single machine."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    alone = kind == "one"
    if not alone:
        dist.init_process_group("gloo")
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    (x, y), (held_x, held_y) = race.load()
    x, y, held_x, held_y = x[rank::world], y[rank::world], held_x[rank::world], held_y[rank::world]
    if alone:  # a step has the same rows as a worker's step
        model: nn.Module = race.model()
    else:
        # PowerSGD's callbacks wait inside gloo's two threads, so callbacks of two buckets would deadlock.
        model = DistributedDataParallel(race.model(), bucket_cap_mb=ONE_BUCKET_MB if kind == "powersgd" else None)
    optimizer, average = _equip(kind, model, race.optimizer(model.parameters()))
    feed, history, criterion = batches(x, y, race.batch, race.seed + rank), [], nn.CrossEntropyLoss()
    if not alone:
        dist.barrier()
    began, watching = time.perf_counter(), 0.0
    for step in range(1, race.steps + 1):
        inputs, labels = next(feed)
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
        average()
        if step % race.every == 0:
            paused = time.perf_counter()
            loss = _evaluate(model, held_x, held_y, alone)
            watching += time.perf_counter() - paused
            history.append({"steps": step, "seconds": time.perf_counter() - began - watching, "val_loss": loss})
    return {"history": history, "seconds": time.perf_counter() - began - watching, "steps": race.steps}


def _evaluate(model: nn.Module, x: Tensor, y: Tensor, alone: bool) -> float:
    """The mean loss over all held-out rows, each process with its share of them."""
    import torch.distributed as dist

    module = model if alone else model.module
    module.eval()  # type: ignore[union-attr]
    with torch.no_grad():
        total = nn.functional.cross_entropy(module(x), y, reduction="sum")  # type: ignore[operator]
        sums = torch.stack([total, torch.tensor(float(len(y)))])
    module.train()  # type: ignore[union-attr]
    if not alone:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _equip(
    kind: str, model: Any, optimizer: torch.optim.Optimizer
) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """The optimizer, and a function to call after each step."""

    def nothing() -> None:
        return

    if kind == "half":  # torch's hook for bfloat16 does not support CPUs; float16 has the same size
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    elif kind == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook)
    elif kind == "local":
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        local = PostLocalSGDState(None, None, start_localSGD_iter=9, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        model.register_comm_hook(local, post_localSGD_hook)
        averager = PeriodicModelAverager(period=5, warmup_steps=9)  # evaluations then follow an averaging
        return PostLocalSGDOptimizer(optimizer, averager), nothing
    return optimizer, nothing
