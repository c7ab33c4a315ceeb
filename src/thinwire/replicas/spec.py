"""How a replica trains, as plain values that travel to every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from thinwire.replicas.algorithms import Algorithm, BackPropagation
from thinwire.replicas.objectives import Loss, Metric, OptimizerFactory, SchedulerFactory


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How a replica trains; the same on every worker.

    Args:
        loss: a name or a callable of (output, label).
        optimizer: makes the optimizer from the parameters.
        algorithm: how the gradient is found.
        scheduler: makes a learning-rate scheduler from the optimizer.
        scheduler_every: whether the scheduler moves after each step or each epoch.
        metrics: names, or callables of (output, label) by name, measured on validation rows.
        clip_norm: largest norm of a gradient.
        precision: "bfloat16" and "float16" compute forward passes under autocast, float16 with a scaled loss.
        accumulate: pieces that a step's rows are computed in, one after the other.
        compile: whether forward passes of training go through torch.compile.
        device: "cpu", "cuda", or "auto": CUDA where there is one.
        seed: of the model's first values, and with the worker's number of dropout and the like.
    """

    loss: str | Loss
    optimizer: OptimizerFactory
    algorithm: Algorithm = field(default_factory=BackPropagation)
    scheduler: SchedulerFactory | None = None
    scheduler_every: Literal["step", "epoch"] = "epoch"
    metrics: tuple[str, ...] | Mapping[str, Metric] = field(default_factory=tuple)
    clip_norm: float | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    compile: bool = False
    device: str = "auto"
    seed: int = 0
    dense: str | None = None
    """Why gradients of embeddings are to be dense, in words; None where a worker steps along its own."""
