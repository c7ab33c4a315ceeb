"""Where simulated workers' gradients are computed: really, and together where they can be.

A worker's vector rests while its gradient is computed, so the gradient is not needed before the step's time is over.
Until then the batch waits; whoever's time is over first has all that wait computed at once. Replicas whose batches are
alike go through the network as one: their parameters are rows of one matrix, and `torch.func.vmap` does the rest.
"""

from __future__ import annotations

import logging
import math
import time as real
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.cluster.simulated.fibers import VirtualTime
from thinwire.cluster.simulated.steps import StepTimes
from thinwire.parameters import FlatParameters
from thinwire.replicas import BackPropagation, TorchReplica, TrainSpec

_log = logging.getLogger("thinwire.simulated")

MEASURED_STEPS = 3


@dataclass(eq=False)
class _Wanted:
    """A gradient that is to be there when a step's time is over."""

    replica: LabReplica
    batch: Any
    loss: float | None = None
    error: BaseException | None = None


class Lab:
    """The gradients of all workers of one run."""

    def __init__(self, time: VirtualTime, steps: StepTimes, workers: int) -> None:
        self._time, self._steps, self._workers = time, steps, workers
        self._wanted: list[_Wanted] = []
        self._stack: Stack | None = None
        self.computed = self.together = 0
        """Gradients, and how many of them were not computed alone."""

    def replica(self, model: Any, spec: TrainSpec, worker: int = 0) -> TorchReplica:
        """What `thinwire.job` makes a worker's replica with."""
        made = LabReplica(self, model, spec, worker)
        if stackable(made):
            if self._stack is None or self._stack.full:
                self._stack = Stack(made.parameters.size, self._workers, made.device)
            self._stack.take_in(made)
        return made

    def gradient(self, replica: LabReplica, batch: Any) -> float:
        """A step's gradient and loss, once the time that a step takes has passed."""
        if not self._steps.known:
            self._steps.measured(self._measure(replica, batch), replica.vector.numel())
        wanted = _Wanted(replica, batch)
        self._wanted.append(wanted)
        try:
            self._time.sleep(self._steps.draw(replica.worker))
            if wanted.loss is None and wanted.error is None:
                self._compute()
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        if wanted.error is not None:
            raise wanted.error
        assert wanted.loss is not None
        return wanted.loss

    def _measure(self, replica: LabReplica, batch: Any) -> float:
        """What a step takes on this machine, alone."""
        took = []
        for _ in range(MEASURED_STEPS):
            began = real.perf_counter()
            replica.compute(batch)
            replica.check()
            took.append(real.perf_counter() - began)
        return min(took)

    def _compute(self) -> None:
        wanted, self._wanted = self._wanted, []
        self.computed += len(wanted)
        alike: dict[Any, list[_Wanted]] = {}
        for one in wanted:
            alike.setdefault(one.replica.alike(one.batch), []).append(one)
        with torch.enable_grad():
            for shape, group in alike.items():
                if shape is not None and len(group) > 1 and self._together(group):
                    continue
                for one in group:
                    try:
                        one.loss = one.replica.compute(one.batch)
                    except Exception as error:
                        one.error = error

    def _together(self, group: list[_Wanted]) -> bool:
        stack = group[0].replica.stack
        assert stack is not None
        try:
            losses = stack.gradients([one.replica for one in group], [one.batch for one in group])
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            _log.warning("replicas are computed one by one: %s", str(error).splitlines()[0])
            for replica in stack.replicas:
                replica.stack = None
            return False
        self.together += len(group)
        for one, loss in zip(group, losses, strict=True):
            if math.isfinite(loss):
                one.loss = loss
            else:
                one.error = one.replica.diverged(loss)
        return True


class LabReplica(TorchReplica):
    """A replica whose gradients the lab computes."""

    def __init__(self, lab: Lab, model: nn.Module | Callable[[], nn.Module], spec: TrainSpec, worker: int) -> None:
        super().__init__(model, spec, worker)
        self.worker, self._lab = worker, lab
        self.stack: Stack | None = None
        self.row = 0

    def gradient(self, batch: Any) -> float:
        return self._lab.gradient(self, batch)

    def compute(self, batch: Any) -> float:
        """The gradient and the loss, now."""
        return super().gradient(batch)

    def diverged(self, loss: float) -> Exception:
        return self._diverged(self.steps + 1, loss)

    def alike(self, batch: Any) -> Any:
        """Equal for batches that can be computed together; None where none can."""
        if self.stack is None:
            return None
        tensors = (*batch.inputs, batch.label, batch.weight)
        return id(self.stack), tuple(None if t is None else (t.shape, t.dtype) for t in tensors)


def stackable(replica: LabReplica) -> bool:
    """Whether one pass through several replicas at once gives what each would give, and is worth it.

    On a processor convolutions of several networks at once are slower than one after the other.
    """
    plain = type(replica.spec.algorithm) is BackPropagation and not replica._searches
    if not plain or replica.spec.precision != "float32" or not isinstance(replica.module, nn.Module):
        return False
    convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in replica.module.modules())
    recurrent = any(isinstance(m, nn.RNNBase) for m in replica.module.modules())
    return not recurrent and (replica.device.type != "cpu" or not convolutions)


class Stack:
    """Replicas of one shape whose parameters are rows of one matrix, and whose buffers are rows of others."""

    def __init__(self, size: int, rows: int, device: torch.device) -> None:
        self._matrix = torch.zeros(rows, size, device=device)
        self._buffers: dict[str, Tensor] = {}
        self.replicas: list[LabReplica] = []

    @property
    def full(self) -> bool:
        return len(self.replicas) == len(self._matrix)

    def take_in(self, replica: LabReplica) -> None:
        """Moves a replica's parameters and buffers into a row of their own."""
        replica.row, replica.stack = len(self.replicas), self
        self.replicas.append(replica)
        replica.parameters.move_to(self._matrix[replica.row])
        for path, module in replica.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                whole = f"{path}.{name}" if path else name
                if whole not in self._buffers:
                    self._buffers[whole] = buffer.new_zeros((len(self._matrix), *buffer.shape))
                row = self._buffers[whole][replica.row]
                row.copy_(buffer)
                module._buffers[name] = row
        replica.buffers = type(replica.buffers)(replica.module)

    def gradients(self, replicas: list[LabReplica], batches: list[Any]) -> list[float]:
        """The gradients of these replicas, each of its own batch, into their parameters; returns their losses."""
        first = replicas[0]
        rows = [replica.row for replica in replicas]
        everyone = rows == list(range(len(self._matrix)))
        pick = slice(None) if everyone else torch.tensor(rows, device=self._matrix.device)
        parameters = _named(first.parameters, self._matrix[pick])
        buffers = {name: values if everyone else values[pick] for name, values in self._buffers.items()}
        inputs = tuple(torch.stack(column) for column in zip(*(b.inputs for b in batches), strict=True))
        labels, weights = _stacked([b.label for b in batches]), _stacked([b.weight for b in batches])

        def loss_of(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Any, label: Any, weight: Any
        ) -> Tensor:
            output = torch.func.functional_call(first.module, (parameters, buffers), inputs)
            return first._objective.mean(output, label, weight)

        axes = (0, 0, 0, None if labels is None else 0, None if weights is None else 0)
        grown = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=axes, randomness="different")
        found, losses = grown(parameters, buffers, inputs, labels, weights)
        if not everyone:
            for name, values in buffers.items():
                self._buffers[name][pick] = values
        for place, replica in enumerate(replicas):
            for name, parameter in zip(replica.parameters.names, replica.parameters.tensors, strict=True):
                parameter.grad = found[name][place]
        told: list[float] = losses.detach().tolist()
        return told


def _named(parameters: FlatParameters, matrix: Tensor) -> dict[str, Tensor]:
    """The parameters of all rows, by name: views of the matrix."""
    found = {}
    for name, offset, one in zip(parameters.names, parameters.offsets, parameters.tensors, strict=True):
        found[name] = matrix[:, offset : offset + one.numel()].view(len(matrix), *one.shape)
    return found


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    return None if tensors[0] is None else torch.stack([t for t in tensors if t is not None])
