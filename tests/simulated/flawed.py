"""Simulated runs in which chosen workers compute NaN or infinity at chosen steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.checkpoint import CheckpointStore
from thinwire.checkpoint.finite import why_not_finite
from thinwire.errors import DivergedError
from thinwire.strategies import Strategy

STEPS = 12
Flawed = Callable[[Any, float], float]


def nan_gradient(replica: Any, loss: float) -> float:
    replica.parameters.tensors[0].grad.view(-1)[3] = float("nan")
    return loss


def infinite_gradient(replica: Any, loss: float) -> float:
    replica.parameters.tensors[-1].grad.view(-1)[0] = float("-inf")
    return loss


def nan_loss(replica: Any, loss: float) -> float:
    for parameter in replica.parameters.tensors:
        parameter.grad = None
    return float("nan")


def overflowing_parameters(replica: Any, loss: float) -> float:
    """The step itself overflows, from a loss and a gradient that are finite."""
    with torch.no_grad():
        replica.vector[5] = float("inf")
    return loss


def infinite_statistics(replica: Any, loss: float) -> float:
    """A running variance overflows, and nothing else says so."""
    for name, buffer in replica.buffers.floating.items():
        if name.endswith("running_var"):
            buffer.view(-1)[0] = float("inf")
    return loss


def infinite_moments(replica: Any, loss: float) -> float:
    """What an optimizer keeps overflows, as a gradient's square does that is finite itself."""
    for kept in replica.optimizer.state.values():
        for value in kept.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.view(-1)[0] = float("inf")
    return loss


def huge_gradient(replica: Any, loss: float) -> float:
    """Finite, and past what its square, its sum over workers, and integer codecs carry."""
    for parameter in replica.parameters.tensors:
        parameter.grad.fill_(3e38)
    return loss


class Net(nn.Module):
    """A small network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.float().reshape(len(x), -1))
        return found


@dataclass
class Site:
    """A simulated cluster some of whose workers' steps go wrong; see `thinwire.cluster.base.Cluster`."""

    cluster: tw.Simulated
    flaw: Flawed
    steps: Collection[int]
    """Counted from 1."""
    workers: Collection[int]
    replicas: list[Any] = field(default_factory=list)

    def site(self, data: Any) -> Any:
        made = self.cluster.site(None)
        made.replica, made.part = self._around(made.replica), self._around(made.part, place=3)
        return made

    def _around(self, first: Callable[..., Any], place: int = 2) -> Callable[..., Any]:
        def replica(*args: Any, **given: Any) -> Any:
            found = first(*args, **given)
            worker, gradient = args[place] if len(args) > place else given.get("worker", 0), found.gradient

            def flawed(batch: Any) -> float:
                loss: float = gradient(batch)
                wrong = worker in self.workers and found.steps + 1 in self.steps
                return self.flaw(found, loss) if wrong else loss

            found.gradient = flawed
            self.replicas.append(found)
            return found

        return replica


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def run(site: Any, strategy: Strategy, **given: Any) -> tuple[tw.Result, list[events.NonFinite]]:
    """What a run comes to, and what was told of numbers that are not finite."""
    told: list[events.NonFinite] = []

    def see(event: events.Event) -> None:
        if isinstance(event, events.NonFinite):
            told.append(event)

    asked: dict[str, Any] = {
        "model": Net, "data": "digits", "inputs": ["pixels"], "steps": STEPS, "batch_size": 32, "validation": 0.1,
        "optimizer": momentum_sgd, "checkpoint_every": 4, "progress": False,
    }  # fmt: skip
    return tw.fit(cluster=site, strategy=strategy, callbacks=[see], **(asked | given)), told


def checkpoints(out: Any) -> list[str]:
    """The names of a run's checkpoints; fails where one holds a number that is not finite."""
    store = CheckpointStore(f"{out}/checkpoints")
    found = []
    for manifest in store.manifests():
        assert manifest.meta["finite"] is True
        found.append(manifest.name)
        for part in manifest.parts:
            tree: Any = store.read_part(manifest, part.name)
            assert not why_not_finite(tree), (manifest.name, part.name)
            _all_finite(tree, f"{manifest.name}/{part.name}")
    return found


def _all_finite(tree: Any, where: str) -> None:
    if isinstance(tree, torch.Tensor):
        assert not tree.is_floating_point() or tree.isfinite().all(), where
    elif isinstance(tree, dict):
        for name, value in tree.items():
            _all_finite(value, f"{where}/{name}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            _all_finite(value, f"{where}/{index}")


def is_finite(module: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in module.state_dict().values())


def diverged_or_sound(out: Any, site: Any, strategy: Strategy, **given: Any) -> str:
    """Runs, and sees that no number that is not finite is left anywhere; returns the error's text, if it ends in one.

    A run is complete with a finite model, or ends in an error that names a worker and the newest checkpoint. All
    checkpoints are finite, and the newest one that was committed is there.
    """
    error = ""
    try:
        result, _ = run(site, strategy, out=str(out), **given)
    except DivergedError as raised:
        error = str(raised)
        assert re.search(r"worker \d on machine-\d", error), error
    kept = checkpoints(out)
    if error:
        assert (f"The last good checkpoint is {kept[-1]}:" if kept else "No checkpoint had been written") in error
    else:
        assert result.summary["complete"]
        assert is_finite(result.model)
        assert kept[-1] == result.summary["checkpoint"]
    return error
