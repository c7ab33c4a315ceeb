"""A module's parameters as views of one flat vector, so that a fragment is a slice and a contribution one copy."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from thinwire.errors import ConfigError

ALIGN = 16
"""Elements to which every parameter's offset is rounded up: 64 bytes, the alignment of torch's own allocator.

Kernels choose their path by alignment. Without it a replica would not equal plain training bit for bit.
"""

GRAIN = 256
"""Elements to which fragment and slice borders are rounded: one quantisation block."""


class Fragment(NamedTuple):
    """A contiguous slice of the flat vector; its borders are independent of layers."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.stop]


def fragments(size: int, count: int, *, grain: int = GRAIN) -> tuple[Fragment, ...]:
    """`count` fragments of nearly equal size that cover `size` elements, borders on multiples of `grain`.

    >>> fragments(1000, 3, grain=256)
    (Fragment(start=0, stop=256), Fragment(start=256, stop=768), Fragment(start=768, stop=1000))
    >>> fragments(100, 2)
    (Fragment(start=0, stop=100), Fragment(start=100, stop=100))
    """
    if count < 1:
        raise ConfigError(f"fragments = {count} is not possible; use a whole number of at least 1")
    grains = -(-size // grain)
    borders = [min(size, round(i * grains / count) * grain) for i in range(count)] + [size]
    if grains < count:  # fewer grains than fragments: the first ones get a grain each, the rest are empty
        borders = [min(size, i * grain) for i in range(count)] + [size]
    return tuple(Fragment(a, b) for a, b in itertools.pairwise(borders))


class FlatParameters:
    """The trainable parameters of a module, moved into one flat float32 vector that the module now views.

    Build it before the optimizer. Parameters that need no gradient stay where they are and are not exchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        _check(named)
        self.names = tuple(name for name, _ in named)
        self.narrow = {name: p.dtype for name, p in named if p.dtype != torch.float32}
        """Original types of parameters that are float32 here and are rounded to that type for a forward pass."""
        self.tensors: tuple[nn.Parameter, ...] = tuple(p for _, p in named)
        offsets, end = [], 0
        for parameter in self.tensors:
            offsets.append(end)
            end += -(-parameter.numel() // ALIGN) * ALIGN
        self.offsets = tuple(offsets)
        self.move_to(torch.zeros(end, dtype=torch.float32, device=self.tensors[0].device))

    def move_to(self, vector: Tensor) -> None:
        """Makes the parameters views of another vector, and copies their values to it."""
        self.vector = vector
        with torch.no_grad():
            for parameter, view in zip(self.tensors, self.views(vector), strict=True):
                view.copy_(parameter)
                parameter.data = view

    @property
    def size(self) -> int:
        return self.vector.numel()

    def views(self, vector: Tensor) -> list[Tensor]:
        """The slices of `vector` shaped as the parameters, in their order."""
        return [vector[o : o + p.numel()].view(p.shape) for o, p in zip(self.offsets, self.tensors, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters by name, as views of `vector`."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def gather_gradients(self, out: Tensor) -> None:
        """Copies every gradient into the flat vector `out`. A missing gradient counts as zero; padding stays."""
        for parameter, view in zip(self.tensors, self.views(out), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(_dense(parameter.grad))

    def absent(self) -> list[int]:
        """Numbers of the parameters that have no gradient."""
        return [number for number, parameter in enumerate(self.tensors) if parameter.grad is None]

    def scatter_gradients(self, gradient: Tensor, absent: Collection[int] = ()) -> None:
        """Makes slices of the flat `gradient` the parameters' gradients; parameters with numbers in `absent` get none.

        An optimizer does not change a parameter without a gradient, neither by momentum nor by weight decay.
        """
        for number, (parameter, view) in enumerate(zip(self.tensors, self.views(gradient), strict=True)):
            if number in absent:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def add_to_gradients(self, term: Tensor) -> None:
        """Adds slices of the flat `term` to those gradients that exist (MPCA eq. 6)."""
        for parameter, view in zip(self.tensors, self.views(term), strict=True):
            if parameter.grad is not None:
                parameter.grad = _dense(parameter.grad).add_(view)

    def digest(self, values: Tensor | None = None) -> str:
        """A short hash of names, shapes and values (by default its own), equal on replicas that start equal."""
        hashed = hashlib.blake2b(digest_size=16)
        for name, parameter in zip(self.names, self.tensors, strict=True):
            hashed.update(f"{name}:{tuple(parameter.shape)};".encode())
        hashed.update((self.vector if values is None else values).detach().cpu().numpy().tobytes())
        return hashed.hexdigest()


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class Buffers:
    """A module's buffers under the joint model's policy: floating ones by weighted mean, counters by maximum.

    Buffers of other types (masks, tables of booleans) are constants of the module and stay local.
    """

    def __init__(self, module: nn.Module) -> None:
        persistent = set(module.state_dict())
        named = [(name, b) for name, b in module.named_buffers() if name in persistent]
        self.floating = {name: b for name, b in named if b.is_floating_point()}
        self.counters = {name: b for name, b in named if b.dtype in (torch.int64, torch.int32) and b.numel() == 1}
        self._checked = self.vector().isfinite()
        """Elements that were finite at the beginning. Others are infinite by design, such as the -inf of a mask."""

    @property
    def size(self) -> int:
        return sum(b.numel() for b in self.floating.values())

    def vector(self) -> Tensor:
        """The floating buffers as one float32 vector on the CPU."""
        if not self.floating:
            return torch.zeros(0)
        parts = [b.detach().to("cpu", torch.float32).reshape(-1) for b in self.floating.values()]
        return torch.cat(parts)

    def count_not_finite(self, vector: Tensor | None = None) -> int:
        """How many elements that were finite at the beginning are not finite, in the buffers or in a vector of them."""
        values = self.vector() if vector is None else vector
        return int((self._checked & ~values.isfinite()).sum())

    def counts(self) -> list[int]:
        return [int(b.item()) for b in self.counters.values()]

    def named(self, vector: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
        """The buffers by name, shaped and typed as the module's own, from a joint vector and counters."""
        found: dict[str, Tensor] = {}
        start = 0
        for name, buffer in self.floating.items():
            piece = vector[start : start + buffer.numel()].view(buffer.shape)
            found[name] = piece.to(buffer.device, buffer.dtype)
            start += buffer.numel()
        for (name, buffer), count in zip(self.counters.items(), counts, strict=True):
            found[name] = torch.full_like(buffer, count)
        return found

    def load(self, vector: Tensor, counts: Sequence[int]) -> None:
        """Writes a joint vector and counters into the module's buffers."""
        for name, value in self.named(vector, counts).items():
            target = self.floating[name] if name in self.floating else self.counters[name]
            target.copy_(value)


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    if not named:
        raise ConfigError("the model has no trainable parameter; set requires_grad on the parameters to be trained")
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"parameter {name!r} is lazy and has no shape yet; run one batch through the model first")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}; trainable parameters are float32, bfloat16 or "
                "float16: convert it, as by model.float()"
            )
    devices = {str(p.device) for _, p in named}
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters are on {sorted(devices)}; one replica lives on one device: move the model there"
        )
