"""Recurrent layers over (T, N, …) with a sequence-continues indicator (T, N): 0 begins a new sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from thinwire.caffe.fillers import Filler
from thinwire.caffe.layers.base import Layer, Shape, layer
from thinwire.errors import ConfigError


class _Recurrent(Layer):
    """What RNN and LSTM have in common: x, cont, perhaps a static x, perhaps first states; their order is Caffe's."""

    states = 1
    bottoms = (2, 5)
    tops = (1, 3)

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        given = spec.recurrent_param
        if given.num_output < 1:
            raise ConfigError(f"num_output = {given.num_output} is not possible; at least 1")
        self.num_output = int(given.num_output)
        self.exposed = self.states if given.expose_hidden else 0
        if len(spec.top) != 1 + self.exposed:
            raise ConfigError(f"it has {len(spec.top)} tops; it gives {1 + self.exposed}")
        if len(spec.bottom) not in (2 + self.exposed, 3 + self.exposed):
            raise ConfigError(
                f"it has {len(spec.bottom)} bottoms; it takes x, cont, perhaps a static x and first states"
            )
        self.static = len(spec.bottom) == 3 + self.exposed
        self.kept = tuple(name for name in self.blobs if self.static or "static" not in name)
        weight, bias = Filler.of(given, "weight_filler"), Filler.of(given, "bias_filler")
        self.reset()
        self._fillers = [bias if name.endswith("bias") else weight for name in self.kept]

    def fillers(self) -> Sequence[Filler]:
        return self._fillers

    def _shapes(self, bottoms: Sequence[Shape], gates: int) -> dict[str, Shape]:
        x = bottoms[0]
        if len(x) < 3 or len(bottoms[1]) != 2 or tuple(bottoms[1]) != tuple(x[:2]):
            raise ConfigError(
                f"its bottoms have the shapes {[tuple(b) for b in bottoms]}; it takes (T, N, …) and (T, N)"
            )
        high = gates * self.num_output
        found = {"input_weight": (high, math.prod(x[2:])), "input_bias": (high,)}
        if self.static:
            found["static_weight"] = (high, math.prod(bottoms[2][1:]))
        return found

    def _inputs(self, bottoms: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What the inputs add to every step, the indicator, and the first states."""
        x, cont, *more = bottoms
        added = F.linear(x.flatten(2), self.held("input_weight"), self.held("input_bias"))
        if self.static:
            added = added + F.linear(more.pop(0).flatten(1), self.held("static_weight"))
        zeros = x.new_zeros(x.shape[1], self.num_output)
        if self.exposed:
            first = [state.detach().view_as(zeros) for state in more]
        else:
            first = [state for state in self._left if state.shape == zeros.shape and state.device == zeros.device]
            first = first if len(first) == self.states else [zeros] * self.states
        return added, cont.detach()[:, :, None], first

    def reset(self) -> None:
        """Forgets the states that the last call left."""
        self._left: list[Tensor] = []

    def _result(self, found: list[Tensor], states: list[Tensor]) -> Any:
        """The tops; states go to whoever called, or to the next call, but no gradient through them: as in Caffe."""
        self._left = [] if self.exposed else [state.detach() for state in states]
        top = torch.stack(found)
        return (top, *(state.detach()[None] for state in states)) if self.exposed else top

    def infer(self, *bottoms: Tensor) -> Any:
        steps, rows = bottoms[0].shape[:2]
        top = bottoms[0].new_empty(steps, rows, self.num_output)
        state = bottoms[0].new_empty(1, rows, self.num_output)
        return (top, *[state] * self.exposed) if self.exposed else top


@layer("RNN")
class RNN(_Recurrent):
    blobs = ("input_weight", "input_bias", "static_weight", "hidden_weight", "output_weight", "output_bias")

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        size = self.num_output
        shapes = self._shapes(bottoms, 1) | {
            "hidden_weight": (size, size),
            "output_weight": (size, size),
            "output_bias": (size,),
        }
        return [shapes[name] for name in self.kept]

    def forward(self, *bottoms: Tensor) -> Any:
        added, cont, (hidden,) = self._inputs(bottoms)
        found = []
        for step in range(added.shape[0]):
            hidden = torch.tanh(added[step] + F.linear(hidden * cont[step], self.held("hidden_weight")))
            found.append(torch.tanh(F.linear(hidden, self.held("output_weight"), self.held("output_bias"))))
        return self._result(found, [hidden])


@layer("LSTM")
class LSTM(_Recurrent):
    blobs = ("input_weight", "input_bias", "static_weight", "hidden_weight")
    states = 2

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        size = self.num_output
        shapes = self._shapes(bottoms, 4) | {"hidden_weight": (4 * size, size)}
        return [shapes[name] for name in self.kept]

    def forward(self, *bottoms: Tensor) -> Any:
        added, cont, (hidden, cell) = self._inputs(bottoms)
        found = []
        for step in range(added.shape[0]):
            gates = added[step] + F.linear(hidden * cont[step], self.held("hidden_weight"))
            let_in, keep, let_out, new = gates.chunk(4, 1)
            cell = cont[step] * torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(new)
            hidden = torch.sigmoid(let_out) * torch.tanh(cell)
            found.append(hidden)
        return self._result(found, [hidden, cell])


@layer("LSTMUnit")
class LSTMUnit(Layer):
    """One step of an LSTM: the cell, the gates' inputs and the indicator in, the next cell and the output out."""

    bottoms = (3, 3)
    tops = (2, 2)

    def forward(self, cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
        let_in, keep, let_out, new = gates.chunk(4, -1)
        kept = cont.detach().reshape(*cell.shape[:-1], 1)
        cell = kept * torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(new)
        return cell, torch.sigmoid(let_out) * torch.tanh(cell)
