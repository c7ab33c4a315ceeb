"""Layers of one's own whose outputs can be shared out among the workers of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from thinwire.errors import ConfigError, nearest

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Share:
    """What one worker of a group is told of its share of a layer.

    Args:
        start: first of the output units that are this worker's.
        stop: the unit after the last of them.
        units: output units of the whole layer.
        part: this worker's number in its group.
        size: workers of the group.
        gather: `gather(x, dim)`: the units of all workers, from the own ones, which lie in that dimension.
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
    """A module that a placement may share out by outputs ("column"). Its class says `as_one_layer = True`, too.

    Each worker of the group gets a copy with its share of the tensors. The copy is called with all features of all rows
    of the group, and gives its own outputs of all rows. Gradients need no care: what several workers used is summed.

    Two attributes may be added. `partition_dim` is the output's dimension that the units lie in, the last one unless
    said. `gathered(shape)` tells a plan what the layer sends while it runs: floats of one row, and in how many gathers,
    for an output of that shape.
    """

    def partition(self, start: int, stop: int) -> Mapping[str, tuple[int, Ranges]]:
        """By the name of each tensor that is shared out, a dimension, and the ranges in it of outputs start to stop.

        Tensors that are not named here are whole on every worker.
        """

    def after_partition(self, share: Share) -> None:
        """Is called on a worker's copy, once its tensors are cut."""


def is_partitionable(module: Any) -> bool:
    """Whether a layer says how it can be shared out, and can be: without hooks and parametrizations."""
    if not isinstance(module, Partitionable) or not getattr(module, "as_one_layer", False):
        return False
    assert isinstance(module, nn.Module)
    return not any(_is_altered(each) for each in module.modules())


def _is_altered(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or nn.utils.parametrize.is_parametrized(module)


def partition_of(module: Partitionable, start: int, stop: int) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """What a layer's `partition` says of some of its outputs, checked.

    Raises:
        ConfigError: It names a tensor, a dimension or a range that is not there.
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
