"""The protocol of custom layers whose outputs can be split among the workers of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from thinwire.errors import ConfigError, nearest

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Share:
    """What one worker of a group is told about its share of a layer.

    Args:
        start: first output unit of this worker.
        stop: the unit after its last one.
        units: output units of the whole layer.
        part: this worker's number in its group.
        size: workers in the group.
        gather: `gather(x, dim)` returns the units of all workers, from the own units in that dimension.
        total: the sum of a tensor over the workers.
    """

    start: int
    stop: int
    units: int
    part: int
    size: int
    gather: Callable[[Tensor, int], Tensor]
    total: Callable[[Tensor], Tensor]


@runtime_checkable
class Partitionable(Protocol):
    """A module that a placement may split by outputs ("column"). Its class must also set `as_one_layer = True`.

    Each worker of the group gets a copy with its share of the tensors. The copy is called with all features of all rows
    of the group, and returns its own outputs for all rows. Gradients of tensors that several workers use are summed.

    Two attributes are optional. `partition_dim` is the output's dimension of the units, by default the last one.
    `gathered(shape)` tells a plan what the layer sends while it runs: floats for one row, and the number of gathers,
    for an output of that shape.
    """

    def partition(self, start: int, stop: int) -> Mapping[str, tuple[int, Ranges]]:
        """By name of each tensor that is split, a dimension, and the ranges in it for outputs `start` to `stop`.

        Tensors that are not named are held in full on every worker.
        """

    def after_partition(self, share: Share) -> None:
        """Called on a worker's copy, after its tensors were split."""


def is_partitionable(module: Any) -> bool:
    """Whether a layer implements the protocol, and has neither hooks nor parametrizations."""
    if not isinstance(module, Partitionable) or not getattr(module, "as_one_layer", False):
        return False
    assert isinstance(module, nn.Module)
    return not any(_is_altered(each) for each in module.modules())


def _is_altered(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or nn.utils.parametrize.is_parametrized(module)


def partition_of(module: Partitionable, start: int, stop: int) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """The checked result of a layer's `partition` for a range of outputs.

    Raises:
        ConfigError: The result names a tensor, a dimension or a range that does not exist.
    """
    assert isinstance(module, nn.Module)
    kind, tensors = type(module).__name__, {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {}
    for name, (dim, ranges) in module.partition(start, stop).items():
        where = f"{kind}.partition({start}, {stop})"
        if name not in tensors:
            raise ConfigError(f"{where} names {name!r}, which the layer does not have. {nearest(name, tensors)}")
        shape = tuple(tensors[name].shape)
        if not -len(shape) <= dim < len(shape):
            raise ConfigError(f"{where} cuts {name!r} in dimension {dim}; it has {len(shape)}, counted from 0")
        dim %= len(shape)
        held = tuple((int(first), int(last)) for first, last in ranges)
        if not held or any(not 0 <= first <= last <= shape[dim] for first, last in held):
            raise ConfigError(
                f"{where} gives {name!r} the ranges {list(held)}; its dimension {dim} has {shape[dim]} numbers: give "
                "pairs (start, stop) from 0 to that"
            )
        found[name] = (dim, held)
    return found
