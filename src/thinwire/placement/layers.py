"""Layers of which a member holds a share: clones of torch's with shorter parameters, and layers that communicate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.placement.crew import Crew
from thinwire.placement.moves import Move, Shape, Total
from thinwire.planning import partition
from thinwire.planning.graph import RECURRENT
from thinwire.planning.partition import Partitionable

GATES = {"LSTM": 4, "GRU": 3}
Share = tuple[int, tuple[tuple[int, int], ...]]
"""A dimension, and ranges in it."""


def shares(module: nn.Module, placement: str, own: tuple[int, int]) -> dict[str, Share]:
    """By name, the share of a layer's tensors for a range of its outputs (of its inputs for a "row" layer)."""
    start, stop = own
    if placement == "row":
        return {"weight": (1, (own,))}
    if isinstance(module, nn.Embedding):
        return {"weight": (1, (own,))}
    if isinstance(module, RECURRENT):
        size = module.hidden_size
        gates = GATES.get(module.mode, 1)
        ranges = tuple((gate * size + start, gate * size + stop) for gate in range(gates))
        return {name: (0, ranges) for name, _ in module.named_parameters()}
    names = ("weight", "bias", "running_mean", "running_var")
    return {name: (0, (own,)) for name in names if isinstance(getattr(module, name, None), Tensor)}


def clone(module: nn.Module) -> nn.Module:
    """A shallow copy of a layer, whose parameters and buffers can be replaced."""
    found = module.__new__(type(module))  # copy.copy would pickle the layer, which parametrized layers refuse
    vars(found).update(vars(module))
    found._parameters, found._buffers = dict(module._parameters), dict(module._buffers)
    return found


class Rowwise(nn.Module):
    """A layer of which each member has a share of the inputs: the outputs are summed over the group."""

    def __init__(self, inner: nn.Module, crew: Crew, shape: Shape) -> None:
        super().__init__()
        self.inner = inner
        self.bias = inner._parameters.get("bias")
        inner._parameters["bias"] = None
        self._dim = shape.feature_dim
        self._summed = Move(crew, shape, "sum", "rows")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._summed(self.inner(x))
        if self.bias is None:
            return found
        shape = [1] * found.dim()
        shape[self._dim] = -1
        return found + self.bias.view(shape)


class Recurrent(nn.Module):
    """A recurrent network of which each member has a share of the units, with all their gates.

    A step needs all units' outputs of the previous step, so they are gathered after each step.
    """

    def __init__(self, layer: nn.RNNBase, crew: Crew, shape: Shape) -> None:
        super().__init__()
        if not isinstance(layer, RECURRENT):
            raise ConfigError(f"{type(layer).__name__} cannot be shared out among workers")
        self.layer, self._depth = layer, layer.num_layers
        self._kind = layer.mode
        self._time = 1 - shape.batch_dim
        self._gather = Move(crew, Shape(0, 1, shape.borders), "features", "full")
        self._units = shape.borders[-1]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = x.transpose(0, 1) if self._time == 1 else x
        for depth in range(self._depth):
            last = depth == self._depth - 1
            full, own = self._run(x, depth, last)
            x = own if last else full
        return (x.transpose(0, 1) if self._time == 1 else x), None

    def _run(self, x: Tensor, depth: int, last: bool) -> tuple[Tensor, Tensor]:
        weight = [getattr(self.layer, f"weight_{kind}_l{depth}") for kind in ("ih", "hh")]
        bias = [getattr(self.layer, f"bias_{kind}_l{depth}", None) for kind in ("ih", "hh")]
        given = nn.functional.linear(x, weight[0], bias[0])
        width = self._width(weight[1])
        full, cell = x.new_zeros(x.shape[1], self._units), x.new_zeros(x.shape[1], width)
        own = x.new_zeros(x.shape[1], width)
        fulls, owns = [], []
        for time in range(x.shape[0]):
            kept = nn.functional.linear(full, weight[1], bias[1])
            own, cell = self._cell(given[time], kept, own, cell)
            owns.append(own)
            if not (last and time == x.shape[0] - 1):
                full = self._gather(own)
                fulls.append(full)
        return torch.stack(fulls) if not last else x, torch.stack(owns)

    def _width(self, weight: Tensor) -> int:
        return weight.shape[0] // GATES.get(self._kind, 1)

    def _cell(self, given: Tensor, kept: Tensor, own: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        if self._kind == "LSTM":
            i, f, g, o = (given + kept).chunk(4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(cell), cell
        if self._kind == "GRU":
            (r, z, n), (hr, hz, hn) = given.chunk(3, 1), kept.chunk(3, 1)
            new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
            keep = torch.sigmoid(z + hz)
            return (1 - keep) * new + keep * own, cell
        active = torch.tanh if self._kind == "RNN_TANH" else torch.relu
        return active(given + kept), cell


class Partitioned(nn.Module):
    """A custom layer of which each member has a share of the outputs."""

    def __init__(self, inner: nn.Module, crew: Crew, shape: Shape) -> None:
        super().__init__()
        self.inner = inner
        start, stop = shape.borders[crew.part : crew.part + 2]
        self._dim, self._width = shape.feature_dim, stop - start

        def gather(x: Tensor, dim: int = -1) -> Tensor:
            found: Tensor = Move(crew, Shape(0, dim % x.dim(), shape.borders), "features", "full")(x)
            return found

        assert isinstance(inner, Partitionable)
        units, total = shape.borders[-1], Total(crew)
        inner.after_partition(partition.Share(start, stop, units, crew.part, crew.size, gather, total))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.inner(*args, **kwargs)
        if found.shape[self._dim] != self._width:
            raise ConfigError(
                f"{type(self.inner).__name__} gives {found.shape[self._dim]} outputs in dimension {self._dim} where "
                f"{self._width} of them are this worker's; have `partition` and `after_partition` give it those alone"
            )
        return found
