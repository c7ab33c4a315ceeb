"""Computes the real gradients of simulated workers, together where possible.

A worker's vector does not change while its gradient is computed, so the gradient is not needed before the end of the
step's time. The batch waits until then. The first worker whose time ends computes the gradients of all waiting batches:
in one pass through the network (`vmap_batching`) or, on a GPU, in parallel (`graphs`).
"""

from __future__ import annotations

import logging
import time as real
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.graphs import Graphs, capturable, untouched
from thinwire.cluster.simulated.steps import StepTimes
from thinwire.cluster.simulated.vmap_batching import VmapBatching, can_vmap
from thinwire.errors import ConfigError
from thinwire.placement import GroupReplica, Placement, part_of
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.hooks import after_gradients

_log = logging.getLogger("thinwire.simulated")

MEASURED_STEPS = 3


@dataclass(eq=False)
class _Wanted:
    """A gradient that is needed at the end of a step's time."""

    replica: BatchedReplica
    batch: Any
    loss: float | None = None
    error: BaseException | None = None


class BatchMethod(Protocol):
    """A method of computing several replicas' gradients."""

    least: int
    """Least number of replicas for which the method pays off."""

    def key(self, replica: TorchReplica, batch: Any) -> Any:
        """A key that is equal for replicas and batches that can be computed together."""

    def gradients(self, replicas: list[TorchReplica], rows: list[int], batches: list[Any]) -> list[float]:
        """Computes the gradients of these replicas, each for its batch, into their parameters; returns the losses."""


class GradientBatcher:
    """Computes the gradients of all workers of one run."""

    def __init__(self, time: VirtualTime, steps: StepTimes, workers: int) -> None:
        self._time, self._steps, self._workers = time, steps, workers
        self._wanted: list[_Wanted] = []
        self._way: VmapBatching | Graphs | None = None
        self.computed = self.together = 0
        """Number of gradients, and of those that were computed together with others."""

    def expected_s(self, parameters: int) -> float | None:
        """Seconds of a step of a network with this number of parameters; None where steps are measured."""
        return self._steps.expected_s(parameters)

    def replica(self, model: Any, spec: TrainSpec, worker: int = 0) -> TorchReplica:
        """Builds a worker's replica for `thinwire.run.job`."""
        made = BatchedReplica(self, model, spec, worker)
        if worker < self._workers and capturable(made):
            self._way = self._way or Graphs()
            made.way = self._way
        elif worker < self._workers and can_vmap(made):
            self._way = self._way or VmapBatching(made.parameters.size, self._workers, made.device)
            assert isinstance(self._way, VmapBatching)
            self._way.take_in(made, worker)  # replaces the worker that had this number before
            made.way = self._way
        return made

    def part(self, placement: Placement, model: Any, spec: TrainSpec, worker: int, **given: Any) -> GroupReplica:
        """Builds a worker's part of a replica for `thinwire.run.job`; its steps take the time of other steps."""
        made = part_of(placement, model, spec, worker, **given)
        gradient = made.gradient

        def timed(batch: Any) -> float:
            if not self._steps.known:
                self._steps.settle(made.vector.numel() * placement.size, _unmeasured)
            self._time.work(self._steps.draw(worker))
            return gradient(batch)

        made.gradient = timed  # type: ignore[method-assign]
        return made

    def gradient(self, replica: BatchedReplica, batch: Any) -> float:
        """A step's loss, with its gradient, after the time of a step has passed."""
        if not self._steps.known:
            self._steps.settle(replica.vector.numel(), lambda: _measured(replica, batch))
        wanted = _Wanted(replica, batch)
        self._wanted.append(wanted)
        try:
            self._time.work(self._steps.draw(replica.worker))
            if wanted.loss is None and wanted.error is None:
                self._compute()
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        if wanted.error is not None:
            raise wanted.error
        assert wanted.loss is not None
        return wanted.loss

    def takes_a_step(self, worker: int) -> None:
        """Lets the time of a worker's step pass, for a further evaluation of the loss within a step."""
        self._time.work(self._steps.draw(worker))

    def _compute(self) -> None:
        wanted, self._wanted = self._wanted, []
        self.computed += len(wanted)
        alike: dict[Any, list[_Wanted]] = {}
        for one in wanted:
            way = one.replica.way
            alike.setdefault(None if way is None else way.key(one.replica, one.batch), []).append(one)
        with torch.enable_grad():
            for group in alike.values():
                if self._together(group):
                    continue
                for one in group:
                    try:
                        one.loss = one.replica.compute(one.batch)
                    except Exception as error:
                        one.error = error

    def _together(self, group: list[_Wanted]) -> bool:
        way = group[0].replica.way
        if way is None or len(group) < way.least:
            return False
        try:
            replicas: list[TorchReplica] = [one.replica for one in group]
            losses = way.gradients(replicas, [r.worker for r in replicas], [one.batch for one in group])  # type: ignore[attr-defined]
        except Exception as error:
            _log.warning("replicas are computed one by one: %s", (str(error) or repr(error)).splitlines()[0])
            for one in group:
                one.replica.way = None
            return False
        self.together += len(group)
        for one, loss in zip(group, losses, strict=True):
            one.loss = loss
        return True


class BatchedReplica(TorchReplica):
    """A replica whose gradients the batcher computes."""

    def __init__(
        self, batcher: GradientBatcher, model: nn.Module | Callable[[], nn.Module], spec: TrainSpec, worker: int
    ) -> None:
        super().__init__(model, spec, worker)
        self.worker, self._batcher = worker, batcher
        self.way: BatchMethod | None = None
        self.gradients.backward = self._backward
        self.gradients.evaluates = lambda: batcher.takes_a_step(worker)
        self._hooks = after_gradients(self.module)
        """The network's own hooks; those of the engine are not to run."""

    def gradient(self, batch: Any) -> float:
        return self._batcher.gradient(self, batch)

    def compute(self, batch: Any) -> float:
        """Computes the gradient and the loss now."""
        return super().gradient(batch)

    def _backward(self, loss: Tensor) -> None:
        """Computes the gradients without hooks, because they are computed before the end of the step's time."""
        asked = [p for p in self.parameters.tensors if p.requires_grad]  # may change during a run
        for parameter, gradient in zip(asked, torch.autograd.grad(loss, asked, allow_unused=True), strict=True):
            parameter.grad = gradient if parameter.grad is None or gradient is None else parameter.grad + gradient
            for hook in self._hooks.get(id(parameter), ()) if gradient is not None else ():
                hook(parameter)


def _unmeasured() -> float:
    raise ConfigError("the steps of a group cannot be measured; give the simulated cluster step_s, or a ratio")


def _measured(replica: BatchedReplica, batch: Any) -> float:
    """Seconds of a step on this machine, without other load."""
    took = []
    with untouched(replica.module):
        for _ in range(MEASURED_STEPS):
            given = batch._replace(inputs=tuple(tensor.clone() for tensor in batch.inputs))
            began = real.perf_counter()
            replica.compute(given)
            replica.owed_flaw()
            took.append(real.perf_counter() - began)
    return min(took)
