"""How one replica makes gradients: piece by piece, under autocast, and again where an optimizer evaluates the loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.replicas.algorithms import BackPropagation, Memory
from thinwire.replicas.objectives import Objective
from thinwire.replicas.owed import Owed
from thinwire.replicas.spec import TrainSpec
from thinwire.replicas.widths import Scale, pieces_of, unscale


def back_propagate(loss: Tensor) -> None:
    """Makes the gradients of a loss; hooks on parameters hear of each."""
    loss.backward()  # type: ignore[no-untyped-call]


class Gradients:
    """Makes gradients of the tensors of a network."""

    def __init__(
        self,
        network: nn.Module,
        tensors: Sequence[nn.Parameter],
        frozen: Sequence[tuple[str, nn.Parameter]],
        spec: TrainSpec,
        objective: Objective,
        owed: Owed,
        *,
        device: torch.device,
        searches: bool,
        memory: Memory,
    ) -> None:
        self._network, self._tensors, self._frozen, self._spec = network, tensors, frozen, spec
        self._objective, self._owed, self._device, self._searches = objective, owed, device, searches
        self.memory = memory
        """What the algorithm and the loss's scale keep from step to step."""
        self.backward: Callable[[Tensor], None] = back_propagate
        self.evaluates: Callable[[], None] = lambda: None
        """Called before each evaluation of the loss within a step but the first."""
        self._batch: Any = None
        self._fresh: Tensor | None = None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What forward passes are made under."""
        if self._spec.precision != "float32":
            return torch.autocast(self._device.type, dtype=getattr(torch, self._spec.precision))
        return contextlib.nullcontext()

    def make(self, batch: Any, steps: int) -> float:
        """Makes the gradient of a batch's mean loss after so many steps, and returns that loss."""
        self.memory["steps"] = steps
        if self._searches:
            self._batch = batch
        if self._spec.precision == "float16":
            return self._scaled(batch)
        value, shown = self._passes(batch, 1.0)
        return self._owed.loss(steps + 1, shown) if value is None else value

    def _clear(self) -> None:
        for parameter in self._tensors:  # what zero_grad does, which takes 20 times as long to get there
            parameter.grad = None

    def _passes(self, batch: Any, scale: float) -> tuple[float | None, Tensor]:
        """Makes the gradients of a batch's loss times a scale, piece by piece; returns the loss, read on a CPU only."""
        self._clear()
        pieces = pieces_of(batch, self._spec.accumulate)
        if len(pieces) > 1:  # the mean of a piece in which no label counts is not a number
            pieces = [piece for piece in pieces if self.weight_of(piece)] or [batch]
        whole = self.weight_of(batch) if len(pieces) > 1 else 1.0
        total: Tensor | None = None
        for piece in pieces:
            with self.autocast():
                loss, shown = self._spec.algorithm.loss(self._network, piece, self._objective, self.memory)
            self._refuse_thawed()
            if self._searches:
                self._fresh = loss.detach()
            if len(pieces) > 1:
                share = self.weight_of(piece) / whole if whole else 0.0
                loss, shown = loss * share, shown * share
            total = shown.detach() if total is None else total + shown.detach()
            # gradients may be on their way as soon as they are made
            if self._device.type != "cpu" or math.isfinite(total.item()):
                self.backward(loss * scale if scale != 1.0 else loss)
        assert total is not None
        return (total.item() if self._device.type == "cpu" else None), total

    def weight_of(self, batch: Any) -> float:
        """What the gradient of a batch counts beside the gradients of other batches."""
        if type(self._spec.algorithm) is BackPropagation:
            return self._objective.weight_of(batch.label, batch.weight, batch.num_rows)
        return self._spec.algorithm.weight_of(batch)

    def _scaled(self, batch: Any) -> float:
        """The gradient of a loss that is scaled so that small gradients do not vanish in float16."""
        scale = Scale(self.memory)
        while True:
            found = float(self._passes(batch, scale.value)[1])
            gradients = [p.grad for p in self._tensors if p.grad is not None]
            if unscale(gradients, scale.value):
                scale.held()
                return found
            if not math.isfinite(found) or not scale.overflowed():
                return found

    def _refuse_thawed(self) -> None:
        """Refuses a parameter that begins to learn in the middle of a run: workers do not exchange it."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} began to require a gradient after {self.memory['steps']} steps; workers "
                    "exchange those that require one when the run begins: let it require one from the start, and set "
                    "requires_grad to False for as long as it is to stay"
                )

    def again(self) -> Tensor:
        """The loss and gradients of the step's batch with the parameters as they are now: first those just computed."""
        found, self._fresh = self._fresh, None
        if found is not None:
            return found
        self.evaluates()
        self._clear()
        with torch.enable_grad(), self.autocast():
            loss, _ = self._spec.algorithm.loss(self._network, self._batch, self._objective, self.memory)
        back_propagate(loss)
        return loss.detach()

    def norm(self) -> float:
        """The length of the gradient as it is now."""
        made = (p.grad for p in self._tensors if p.grad is not None)
        found = [grad.coalesce().values() if grad.is_sparse else grad for grad in made]
        if not found:
            return 0.0
        return float(torch.stack([torch.linalg.vector_norm(each.float()) for each in found]).norm())

    def tree(self) -> dict[str, Any]:
        """What is kept from step to step, for a checkpoint."""
        return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.memory.items()}

    def load(self, tree: dict[str, Any]) -> None:
        """Goes on with what a checkpoint holds."""
        self.memory.clear()
        self.memory.update({k: v.to(self._device) if isinstance(v, Tensor) else v for k, v in tree.items()})
