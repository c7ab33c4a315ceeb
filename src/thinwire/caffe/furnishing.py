"""What gives the layers of a net their parameters: shapes, memory, first values, and which layers share a blob."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.caffe.graph import Node, shared_keys
from thinwire.caffe.layers import InputLayer, Layer, Shape
from thinwire.caffe.prototxt import Definition
from thinwire.errors import ConfigError

SHAPE_ERRORS = (ConfigError, RuntimeError, ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError)
"""What a layer may raise whose bottoms do not fit it."""


class Furnishing:
    """Makes the blobs of a net's layers; the layers are the net's own, by their keys in the file's order."""

    def __init__(
        self, definition: Definition, layers: nn.ModuleDict, keys: Sequence[str], nodes: dict[str, list[Node]]
    ) -> None:
        self._definition, self._layers, self._keys, self._nodes = definition, layers, keys, nodes
        self._same = shared_keys(nodes)
        self._shared: dict[tuple[str, str, int], tuple[int, str]] = {}

    def layer_of(self, node: Node) -> Layer:
        """The layer that a node of the net is."""
        found = self._layers[self._keys[node.index]]
        assert isinstance(found, Layer)
        return found

    def infer(self, nodes: list[Node], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Runs one phase without memory."""
        blobs: dict[str, Tensor] = {}
        found: dict[str, Shape] = {}
        for node in nodes:
            made = self.layer_of(node)
            try:
                if isinstance(made, InputLayer):
                    tops: Any = tuple(torch.empty(_checked(shapes[top]), device="meta") for top in node.tops)
                else:
                    bottoms = [blobs[name] for name in node.bottoms]
                    self._check(node, [tuple(b.shape) for b in bottoms])
                    with torch.no_grad():
                        tops = _as_meta(made).infer(*bottoms)
            except SHAPE_ERRORS as error:
                raise self._definition.error(node.index, str(error)) from error
            tops = tops if isinstance(tops, tuple) else (tops,)
            blobs.update(zip(node.tops, tops, strict=False))
            found.update({name: tuple(top.shape) for name, top in zip(node.tops, tops, strict=False)})
            for name, top in zip(node.tops, tops, strict=False):
                if top.numel() > (1 << 31) - 1:
                    raise self._definition.error(node.index, f"blob {name!r} would have {top.numel():,} numbers")
        return found

    def _check(self, node: Node, bottoms: Sequence[Shape]) -> None:
        """Makes a layer's blobs, or sees that those it has fit its bottoms."""
        made = self.layer_of(node)
        if not made.kept:
            return
        shapes = [tuple(shape) for shape in made.blob_shapes(*bottoms)]
        if not made.is_ready:
            self.furnish(node, shapes)
        for index, shape in enumerate(shapes):
            have = tuple(made.blob(index).shape)
            if have != shape:
                raise ConfigError(f"its {made.kept[index]} has the shape {have}, and its bottoms ask for {shape}")

    def furnish(self, node: Node, shapes: Sequence[Shape]) -> None:
        """Makes a layer's blobs, without memory as yet, or takes those it shares."""
        made = self.layer_of(node)
        made.prepare(shapes)
        for index in range(len(made.kept)):
            self._share(node, made, index)

    def _share(self, node: Node, made: Layer, index: int) -> None:
        """Puts the blob of another layer in place where names say that they are one."""
        spec, same = node.spec(index), self._same.get(node.index)
        key = ("name", spec.name, 0) if spec.name else ("layer", same, index) if same is not None else None
        if key is None:
            return
        if key not in self._shared:
            self._shared[key] = (node.index, made.kept[index])
            return
        donor, name = self._shared[key]
        theirs, mine = getattr(self._layers[self._keys[donor]], name), made.blob(index)
        if theirs.shape != mine.shape and (theirs.numel() != mine.numel() or not spec.permissive):
            raise ConfigError(
                f"its {made.kept[index]} of shape {tuple(mine.shape)} is to be the same as one of shape "
                f"{tuple(theirs.shape)}; shapes must agree, or with share_mode PERMISSIVE their counts"
            )
        made.put(made.kept[index], theirs, seen_as=tuple(mine.shape))

    def materialise(self) -> None:
        """Gives the parameters memory, and fills them as the prototxt says, from torch's generator."""
        done: dict[int, Tensor] = {}
        for made in self._layers.values():
            if not isinstance(made, Layer) or not made.is_ready:
                continue
            for name, filler in zip(made.kept, made.fillers(), strict=True):
                blob = getattr(made, name)
                if blob.device.type != "meta":
                    continue
                if id(blob) not in done:
                    fresh = torch.empty(blob.shape)
                    filler.fill(fresh)
                    done[id(blob)] = fresh if made.statistics else nn.Parameter(fresh)
                made.put(name, done[id(blob)])
        self.mark()

    def mark(self) -> None:
        """Notes on every parameter how fast it learns and decays; of layers that share one, the first says."""
        said: dict[int, list[float | None]] = {}
        for nodes in self._nodes.values():
            for node in nodes:
                made = self.layer_of(node)
                for index in range(len(made.kept) if made.is_ready and not made.statistics else 0):
                    blob: Any = getattr(made, made.kept[index])
                    spec, known = node.spec(index), said.setdefault(id(blob), [None, None])
                    known[0] = spec.lr_mult if known[0] is None else known[0]
                    known[1] = spec.decay_mult if known[1] is None else known[1]
                    blob.lr_mult, blob.decay_mult = (1.0 if value is None else value for value in known)
                    blob.requires_grad_(blob.lr_mult != 0 or self._definition.net.force_backward)


def _checked(shape: Shape) -> Shape:
    if math.prod(shape) > (1 << 31) - 1:
        raise ConfigError(f"its shape {tuple(shape)} has more than 2,147,483,647 numbers")
    return tuple(shape)


def _as_meta(made: Layer) -> Layer:
    """A layer to try shapes with: itself while it has no memory, else a copy without."""
    if all(b.device.type == "meta" for b in [*made.parameters(), *made.buffers()]):
        return made
    return copy.deepcopy(made).to("meta")
