"""What a layer is: a module with blobs, made from its part of a prototxt; and the registry of their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from thinwire.caffe import schema
from thinwire.caffe.blobs import MAX_ELEMENTS
from thinwire.caffe.fillers import Filler
from thinwire.errors import ConfigError, nearest

Shape = tuple[int, ...]
REGISTRY: dict[str, type[Layer]] = {}
OWN: dict[str, tuple[type[Layer], str | None]] = {}
"""Layers that users have registered, with their fields: workers learn of them from what travels there."""
L = TypeVar("L", bound="type[Layer]")


class Layer(nn.Module):
    """One layer. It takes its settings from a LayerParameter as plain values, and keeps nothing of the message.

    A layer with parameters gives `blob_shapes` and `fillers`; everything else is `forward`, from bottoms to tops.

    Args:
        spec: the LayerParameter.
    """

    blobs: ClassVar[tuple[str, ...]] = ()
    """Names of the parameter blobs, in Caffe's order."""
    is_loss: ClassVar[bool] = False
    """Whether its first top counts as loss unless said otherwise."""
    needs_labels: ClassVar[bool] = False
    """Whether it may be left out when the net is called without labels."""
    statistics: ClassVar[bool] = False
    """Whether its blobs are measured, not learnt."""
    as_one_layer: ClassVar[bool] = True
    """A plan calls it and does not look into it."""
    bottoms: ClassVar[tuple[int, float]] = (1, 1)
    """How many bottoms at least and at most."""
    tops: ClassVar[tuple[int, float]] = (1, 1)

    def __init__(self, spec: Any) -> None:
        super().__init__()
        for what, have, (low, high) in (
            ("bottoms", len(spec.bottom), self.bottoms),
            ("tops", len(spec.top), self.tops),
        ):
            if not low <= have <= high:
                wanted = f"{low}" if low == high else f"at least {low}" if high == math.inf else f"{low} to {high:.0f}"
                raise ConfigError(f"it has {have} {what}; it takes {wanted}")
        self.num_tops = len(spec.top)
        self._phase = spec.phase == 0 if spec.HasField("phase") else None
        self.kept: tuple[str, ...] = self.blobs
        """Names of the blobs that it has under its settings."""
        self._seen_as: dict[str, Shape] = {}

    def blob_shapes(self, *bottoms: Shape) -> Sequence[Shape]:
        """The shape of every blob, from those of the bottoms."""
        return ()

    def implied_bottoms(self, shapes: Sequence[Shape]) -> Sequence[Shape] | None:
        """Bottoms that blobs of these shapes would be made for; None where they do not tell."""
        return None

    def fillers(self) -> Sequence[Filler]:
        """What every blob starts with."""
        return [Filler()] * len(self.kept)

    def legacy_shape(self, index: int, shape: Shape) -> Shape:
        """What a blob's four old dimensions mean here, where nothing else tells its shape."""
        return (math.prod(shape),) if self.kept[index] == "bias" else shape

    # -- blobs ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether its blobs are there."""
        return all(getattr(self, name, None) is not None for name in self.kept)

    def prepare(self, shapes: Sequence[Shape]) -> None:
        """Makes the blobs, without memory as yet."""
        for name, shape in zip(self.kept, shapes, strict=True):
            count = math.prod(shape)
            if count > MAX_ELEMENTS:
                raise ConfigError(
                    f"its {name} would have {count:,} numbers, shape {shape}; at most {MAX_ELEMENTS:,} are read"
                )
            if any(size < 1 for size in shape):
                raise ConfigError(f"its {name} would have the shape {shape}; every size must be at least 1")
            self.put(name, torch.empty(shape, device="meta"))

    def put(self, name: str, blob: Tensor, *, seen_as: Shape | None = None) -> None:
        """Gives the layer a blob, a parameter, or a buffer where it is measured; another shape may be seen in it."""
        if self.statistics:
            self.register_buffer(name, blob)
        else:
            self.register_parameter(name, blob if isinstance(blob, nn.Parameter) else nn.Parameter(blob))
        if seen_as is not None and seen_as != tuple(blob.shape):
            self._seen_as[name] = seen_as

    def held(self, name: str) -> Tensor:
        """A blob by name."""
        found: Tensor = getattr(self, name)
        return found.view(self._seen_as[name]) if name in self._seen_as else found

    def blob(self, index: int) -> Tensor:
        """A blob by its place in Caffe's order."""
        return self.held(self.kept[index])

    def train(self, mode: bool = True) -> Layer:
        """A layer that names a phase of its own stays in it."""
        super().train(mode if self._phase is None else self._phase)
        return self

    def infer(self, *bottoms: Tensor) -> Any:
        """What `forward` would give, on tensors without memory."""
        return self(*bottoms)


def layer(name: str, *, fields: str | None = None) -> Callable[[L], L]:
    """Registers a class of layers under a type's name; networks may use it from then on.

    Args:
        name: as prototxts write it in `type`.
        fields: its own parameters, in the notation of `fields.txt`; see `thinwire.caffe.schema.extend`.
    """
    if fields is not None:
        schema.extend(fields)

    def register(kind: L) -> L:
        REGISTRY[name] = kind
        if not kind.__module__.startswith("thinwire.caffe."):
            OWN[name] = (kind, fields)
        return kind

    return register


def adopt(layers: Mapping[str, tuple[type[Layer], str | None]]) -> None:
    """Registers the layers that another process has registered; those that are here already stay."""
    for name, (kind, fields) in layers.items():
        if name not in OWN:
            layer(name, fields=fields)(kind)


def make(spec: Any) -> Layer:
    """The layer that a LayerParameter describes."""
    name = spec.type
    if name == "Python":
        name = spec.python_param.layer
        if name not in REGISTRY:
            raise ConfigError(
                f"the Python layer {name!r} is not registered; write it as a thinwire.caffe.Layer and register it "
                f"with @thinwire.caffe.layer({name!r})"
            )
    if name not in REGISTRY:
        raise ConfigError(
            f"type {name!r} is not supported. {nearest(name, REGISTRY)} "
            "Write it as a thinwire.caffe.Layer and register it with @thinwire.caffe.layer."
        )
    return REGISTRY[name](spec)


def enum(parameter: Any, field: str) -> str:
    """The name of an enumeration's value."""
    found: str = parameter.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[getattr(parameter, field)].name
    return found


def axis_of(axis: int, dims: int) -> int:
    """An axis that may count from the end."""
    if not -dims <= axis < dims:
        raise ConfigError(f"axis {axis} is not among the {dims} of its bottom")
    return axis % dims
