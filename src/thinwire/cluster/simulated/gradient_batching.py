"""Where simulated workers' gradients are computed: really, and together where they can be.

A worker's vector rests while its gradient is computed, so the gradient is not needed before the step's time is over.
Until then the batch waits; whoever's time is over first has all that wait computed at once: as one pass through the
network (`stacks`) or, on a GPU, side by side (`graphs`).
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
from thinwire.cluster.simulated.stacks import Stack, stackable
from thinwire.cluster.simulated.steps import StepTimes
from thinwire.errors import ConfigError
from thinwire.placement import GroupReplica, Placement, part_of
from thinwire.replicas import TorchReplica, TrainSpec
from thinwire.replicas.hooks import after_gradients

_log = logging.getLogger("thinwire.simulated")

MEASURED_STEPS = 3


@dataclass(eq=False)
class _Wanted:
    """A gradient that is to be there when a step's time is over."""

    replica: LabReplica
    batch: Any
    loss: float | None = None
    error: BaseException | None = None


class Way(Protocol):
    """A way to compute several replicas' gradients."""

    least: int
    """Replicas for which it is worth it."""

    def key(self, replica: TorchReplica, batch: Any) -> Any:
        """Equal for replicas and batches that can be computed at once."""

    def gradients(self, replicas: list[TorchReplica], rows: list[int], batches: list[Any]) -> list[float]:
        """The gradients of these replicas, each of its own batch, into their parameters; returns their losses."""


class GradientBatcher:
    """The gradients of all workers of one run."""

    def __init__(self, time: VirtualTime, steps: StepTimes, workers: int) -> None:
        self._time, self._steps, self._workers = time, steps, workers
        self._wanted: list[_Wanted] = []
        self._way: Stack | Graphs | None = None
        self.computed = self.together = 0
        """Gradients, and how many of them were not computed alone."""

    def expected_s(self, parameters: int) -> float | None:
        """Seconds of a step of a network with so many parameters; None where steps are measured."""
        return self._steps.expected_s(parameters)

    def replica(self, model: Any, spec: TrainSpec, worker: int = 0) -> TorchReplica:
        """What `thinwire.run.job` makes a worker's replica with."""
        made = LabReplica(self, model, spec, worker)
        if worker < self._workers and capturable(made):
            self._way = self._way or Graphs()
            made.way = self._way
        elif worker < self._workers and stackable(made):
            self._way = self._way or Stack(made.parameters.size, self._workers, made.device)
            assert isinstance(self._way, Stack)
            self._way.take_in(made, worker)  # in place of whoever had this number before
            made.way = self._way
        return made

    def part(self, placement: Placement, model: Any, spec: TrainSpec, worker: int, **given: Any) -> GroupReplica:
        """What `thinwire.run.job` makes a worker's part of a replica with: its steps take as long as others' do."""
        made = part_of(placement, model, spec, worker, **given)
        gradient = made.gradient

        def timed(batch: Any) -> float:
            if not self._steps.known:
                self._steps.settle(made.vector.numel() * placement.size, _unmeasured)
            self._time.work(self._steps.draw(worker))
            return gradient(batch)

        made.gradient = timed  # type: ignore[method-assign]
        return made

    def gradient(self, replica: LabReplica, batch: Any) -> float:
        """A step's gradient and loss, once the time that a step takes has passed."""
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
        """Has the time pass that a worker's step takes, as a further evaluation of the loss within a step does."""
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


class LabReplica(TorchReplica):
    """A replica whose gradients the lab computes."""

    def __init__(
        self, lab: GradientBatcher, model: nn.Module | Callable[[], nn.Module], spec: TrainSpec, worker: int
    ) -> None:
        super().__init__(model, spec, worker)
        self.worker, self._lab = worker, lab
        self.way: Way | None = None
        self._hooks = after_gradients(self.module)
        """The network's own; the engine's are to hear of nothing."""

    def gradient(self, batch: Any) -> float:
        return self._lab.gradient(self, batch)

    def compute(self, batch: Any) -> float:
        """The gradient and the loss, now."""
        return super().gradient(batch)

    def _evaluated(self) -> Tensor:
        self._lab.takes_a_step(self.worker)
        return super()._evaluated()

    def backward(self, loss: Tensor) -> None:
        """Makes them unheard of: they are computed before the moment at which the step is over."""
        asked = [p for p in self.parameters.tensors if p.requires_grad]  # it may change as a run goes on
        for parameter, gradient in zip(asked, torch.autograd.grad(loss, asked, allow_unused=True), strict=True):
            parameter.grad = gradient if parameter.grad is None or gradient is None else parameter.grad + gradient
            for hook in self._hooks.get(id(parameter), ()) if gradient is not None else ():
                hook(parameter)


def _unmeasured() -> float:
    raise ConfigError("the steps of a group are not measured here; give the simulated cluster step_s, or a ratio")


def _measured(replica: LabReplica, batch: Any) -> float:
    """What a step takes on this machine, alone."""
    took = []
    with untouched(replica.module):
        for _ in range(MEASURED_STEPS):
            given = batch._replace(inputs=tuple(tensor.clone() for tensor in batch.inputs))
            began = real.perf_counter()
            replica.compute(given)
            replica.owed_flaw()
            took.append(real.perf_counter() - began)
    return min(took)
