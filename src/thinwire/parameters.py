"""A module's parameters as views of one flat vector, so that a fragment is a slice and a contribution one copy."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

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
        check_trainable(module)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
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
        self._places = {f"{p}.{n}" if p else n: (m._buffers, n) for p, m in module.named_modules() for n in m._buffers}
        """Where a buffer is looked up: a network may put another tensor in its place as it goes."""
        self._places |= {name: ({name: buffer}, name) for name, buffer in named if name not in self._places}
        self._shapes = {name: b.shape for name, b in named if b.is_floating_point()}
        self._counted = [name for name, b in named if b.dtype in (torch.int64, torch.int32) and b.numel() == 1]
        self._checked = self.vector().isfinite()
        """Elements that were finite at the beginning. Others are infinite by design, such as the -inf of a mask."""

    @property
    def floating(self) -> dict[str, Tensor]:
        """By name, those of floating types as they are now."""
        found = {name: self._now(name) for name in self._shapes}
        for name, shape in self._shapes.items():
            if found[name].shape != shape:
                raise ConfigError(changed_shape(name, shape, found[name].shape))
        return found

    @property
    def counters(self) -> dict[str, Tensor]:
        """By name, the single whole numbers as they are now."""
        return {name: self._now(name) for name in self._counted}

    def _now(self, name: str) -> Tensor:
        holder, key = self._places[name]
        found: Tensor = holder[key]
        return found.detach()

    @property
    def size(self) -> int:
        return sum(shape.numel() for shape in self._shapes.values())

    def vector(self) -> Tensor:
        """The floating buffers as one float32 vector on the CPU."""
        parts = [b.to("cpu", torch.float32).reshape(-1) for b in self.floating.values()]
        if not parts:
            return torch.zeros(0)
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
            self._now(name).copy_(value)


def changed_shape(name: str, before: torch.Size, now: torch.Size) -> str:
    """What is wrong with a buffer whose shape a forward pass changes, and what to do about it."""
    return (
        f"buffer {name!r} has the shape {tuple(now)} after a forward pass, and had {tuple(before)}; workers exchange "
        "buffers of one shape: keep what grows in a plain attribute, or register it with persistent=False"
    )


def check_trainable(module: nn.Module) -> None:
    """Refuses parameters that cannot be kept in one vector of float32.

    Raises:
        ConfigError: There is none, one has no shape yet, is of another type, or shares its memory.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError(
            f"the model {type(module).__name__} has no parameter that can be trained: it has none, or all are frozen; "
            "leave requires_grad on where it is to learn"
        )
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"parameter {name!r} is lazy and has no shape yet; run one batch through the model first")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}; trainable parameters are float32, bfloat16 or "
                "float16: convert it, as by model.float()"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ConfigError(
                f"parameter {name!r} of the shape {tuple(parameter.shape)} repeats its numbers in memory, as expand "
                "leaves them, so that no optimizer can step it; give it memory of its own: nn.Parameter(x.clone())"
            )
    devices = {str(p.device) for _, p in named}
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters are on {sorted(devices)}; one replica lives on one device: move the model there"
        )
    _refuse_shared(module)


def _refuse_shared(module: nn.Module) -> None:
    """Refuses parameters that share memory with another tensor of the module: in one vector they would not."""
    tensors: list[tuple[str, Tensor]] = [(f"parameter {name!r}", p) for name, p in module.named_parameters()]
    tensors += [(f"buffer {name!r}", b) for name, b in module.named_buffers()]
    known = {id(tensor) for _, tensor in tensors}
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and id(value) not in known:
                tensors.append((f"attribute {f'{path}.{name}' if path else name!r}", value))
    in_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if (
            tensor.device.type == "meta"
            or isinstance(tensor, UninitializedBuffer | UninitializedParameter)
            or not tensor.numel()
        ):
            continue
        in_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for together in in_memory.values():
        for (name, one), (other, second) in itertools.combinations(together, 2):
            if (one.requires_grad or second.requires_grad) and _overlap(one, second):
                raise ConfigError(
                    f"{other} shares memory with {name}: a step on one would move the other, and workers keep each by "
                    "itself. Give both names one nn.Parameter, as self.b.weight = self.a.weight does, or give each "
                    "memory of its own: nn.Parameter(x.clone())"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    (first, last), (begin, end) = _extent(one), _extent(other)
    return first <= end and begin <= last and not _elements(one).isdisjoint(_elements(other))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage at which a tensor's first and last element begin."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last) * size


def _elements(tensor: Tensor) -> set[int]:
    """Which bytes of its storage a tensor's elements begin at."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * stride
        offsets = offsets.unsqueeze(dim) + steps
    start = int(tensor.storage_offset())
    return {(start + offset) * tensor.element_size() for offset in offsets.flatten().tolist()}
