"""Evaluation of a module: sums of its loss and metrics, and statistics of batch norm measured anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.replicas.metrics import condense, measure
from thinwire.replicas.objectives import Metric, Objective

Sums = tuple[dict[str, float], dict[str, float], int]
"""Sums of loss and metrics, the weights that they count, and the rows."""


class Tally:
    """Sums over batches."""

    def __init__(self, objective: Objective, metrics: Mapping[str, Metric]) -> None:
        self._objective, self._metrics = objective, metrics
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._rows = 0

    def add(self, batch: Any, output: Any) -> None:
        """Takes in the loss and the metrics of a batch."""
        found: dict[str, Any] = {"val_loss": self._objective.total(output, batch.label, batch.weight, batch.num_rows)}
        for name, metric in self._metrics.items():
            measured = measure(name, metric, output, batch.label, batch.weight, batch.num_rows)
            found |= {f"val_{key}": value for key, value in measured.items()}
        self.add_sums(batch, found)
        condense(self._metrics, self._sums, whole=False)

    def add_sums(self, batch: Any, found: Mapping[str, tuple[float, float | None]]) -> None:
        """Takes in a batch's sums, and what each counts."""
        self._rows += batch.num_rows
        for name, (total, counted) in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            if counted is not None:
                self._weights[name] = self._weights.get(name, 0.0) + counted

    def sums(self) -> Sums:
        """All of it."""
        condense(self._metrics, self._sums, whole=True)
        return self._sums, self._weights, self._rows


@contextlib.contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """A module in training or evaluation mode for a moment."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def norms_of(module: nn.Module) -> list[_BatchNorm]:
    """The layers that keep statistics of their inputs."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextlib.contextmanager
def measured_anew(module: nn.Module) -> Iterator[None]:
    """Forgets the statistics of batch norm; those of all batches that go through meanwhile count alike."""
    norms = norms_of(module)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with in_mode(module, training=True):
        yield
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
