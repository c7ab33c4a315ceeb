"""A Caffe network as a torch module: both phases of it, with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from thinwire.caffe.furnishing import SHAPE_ERRORS, Furnishing
from thinwire.caffe.graph import Node, nodes_of, rules_met
from thinwire.caffe.layers import InputLayer, Layer, Shape, make
from thinwire.caffe.prototxt import Definition
from thinwire.errors import ConfigError, DataError, nearest

AUTOMATIC = "(automatic)"
"""What Caffe calls the top of a loss that names none."""
MAX_TOTAL = 1 << 29
"""Numbers in all parameters of a network together: 2 GiB."""


class Outputs(dict[str, Tensor]):
    """A net's output blobs by name; `loss` is all its losses together, by their weights."""

    loss: Tensor | None = None


@fx.wrap
def outputs_of(blobs: Mapping[str, Tensor], loss: Tensor | None) -> Outputs:
    """A net's outputs: one step where torch.fx reads it."""
    found = Outputs(blobs)
    found.loss = loss
    return found


@fx.wrap
def as_numbers(value: Any, dtype: torch.dtype) -> Tensor:
    """An input as numbers of a type: one step where torch.fx reads it."""
    found = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return found if found.is_floating_point() and found.dtype == dtype else found.to(dtype)


class CaffeNet(nn.Module):
    """The network that a prototxt describes. `train()` and `eval()` choose between its TRAIN and TEST phase.

    Call it with its input blobs by name, or in the order of `inputs`. Afterwards `blobs` holds every blob.

    Args:
        described: what the prototxt says.
        phase: the phase it begins in, which has to be whole; what is wrong in the other shows when that is used.
        stages: stages of the net's state, for rules that ask for them.
        level: of the net's state.
    """

    only_whole: ClassVar[str] = "its losses are of a whole batch, and its TEST phase has layers of its own"

    def __init__(
        self, described: Definition, phase: str = "TRAIN", *, stages: Sequence[str] = (), level: int = 0
    ) -> None:
        super().__init__()
        stages = (*described.net.state.stage, *stages)
        self.name = described.net.name
        self.definition = described
        self._state = (tuple(stages), level)
        self.blobs: dict[str, Tensor] = {}
        self.layers = nn.ModuleDict()
        keys: list[str] = []
        phases: dict[str, list[int]] = {"TRAIN": [], "TEST": []}
        self._broken: dict[str, ConfigError] = {}
        taken: dict[str, int] = {}
        for index, spec in enumerate(described.net.layer):
            included: list[str] = []
            made = nn.Module()
            try:
                included = [name for name in phases if rules_met(spec, name, stages, level)]
                made = make(spec) if included else made
            except ConfigError as error:
                for name in included or phases:
                    self._broken.setdefault(name, described.error(index, str(error)))
            keys.append(_unused(spec.name or spec.type or "layer", taken))
            self.layers[keys[-1]] = made
            for name in included:
                phases[name].append(index)
        self._nodes: dict[str, list[Node]] = {}
        for name, chosen in phases.items():
            try:
                self._nodes[name] = [] if name in self._broken else nodes_of(described, chosen)
            except ConfigError as error:
                self._broken[name], self._nodes[name] = error, []
        if phase in self._broken:
            raise self._broken[phase]
        self.train(phase == "TRAIN")
        self.furnishing = Furnishing(described, self.layers, keys, self._nodes)

    # -- what is in it ----------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The layers of the present phase."""
        return self.nodes_in(self.phase)

    @property
    def phase(self) -> str:
        return "TRAIN" if self.training else "TEST"

    @property
    def inputs(self) -> list[str]:
        """The blobs it is called with, in their order."""
        return [top for node in self.nodes if isinstance(self.layer_of(node), InputLayer) for top in node.tops]

    @property
    def params(self) -> dict[str, list[Tensor]]:
        """Every layer's blobs by its name: weight, bias, in Caffe's order and shapes."""
        found: dict[str, list[Tensor]] = {}
        for node in self.nodes:
            made = self.layer_of(node)
            if made.kept and made.is_ready:
                found.setdefault(node.name, [made.blob(i) for i in range(len(made.kept))])
        return found

    @property
    def is_ready(self) -> bool:
        """Whether the shapes of all parameters of the present phase are known."""
        return all(self.layer_of(node).is_ready for node in self.nodes)

    def learnable(self) -> list[tuple[Node, int, Tensor]]:
        """The training phase's own blobs in Caffe's order: node, number in its layer, and the blob."""
        found, seen = [], set()
        for node in self._nodes["TRAIN"]:
            made = self.layer_of(node)
            for index in range(len(made.kept)):
                blob = getattr(made, made.kept[index])
                if id(blob) not in seen:
                    seen.add(id(blob))
                    found.append((node, index, blob))
        return found

    def nodes_in(self, phase: str) -> list[Node]:
        if phase in self._broken:
            raise self._broken[phase]
        return self._nodes[phase]

    def all_nodes(self) -> list[Node]:
        """The layers of both phases, each once, in the file's order."""
        return [node for _, node in sorted({n.index: n for nodes in self._nodes.values() for n in nodes}.items())]

    def layer_of(self, node: Node) -> Layer:
        return self.furnishing.layer_of(node)

    # -- preparing --------------------------------------------------------------------------------------------------

    def known_shapes(self, phase: str | None = None) -> dict[str, Shape]:
        """Input blobs of a phase, the present one unless said, whose shapes the prototxt tells."""
        found: dict[str, Shape] = {}
        for node in self._nodes[phase or self.phase]:
            made = self.layer_of(node)
            if isinstance(made, InputLayer):
                found.update({t: s for t, s in zip(node.tops, made.shapes, strict=True) if s is not None})
        return found

    def prepare(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Works out the shape of every blob, and makes the parameters of layers that lack them.

        They are without memory until `materialise`. Returns the shapes of the present phase's blobs.

        Args:
            shapes: of inputs, in place of or beside those that the prototxt tells.
        """
        found: dict[str, Shape] = {}
        for phase in sorted(self._nodes, key=lambda name: name != self.phase):
            nodes, known = self._nodes[phase], self.known_shapes(phase) | dict(shapes)
            asked = {top for node in nodes if isinstance(self.layer_of(node), InputLayer) for top in node.tops}
            if not asked <= set(known):
                continue
            try:
                inferred = self.furnishing.infer(nodes, known)
                found = inferred if phase == self.phase else found
            except ConfigError as error:
                if phase == self.phase:
                    raise
                self._broken[phase] = error
        total = sum(p.numel() for p in self.parameters())
        if total > MAX_TOTAL:
            raise ConfigError(
                f"{self.definition.file}: its parameters are {total:,} numbers; at most {MAX_TOTAL:,} are read"
            )
        return found

    def materialise(self) -> None:
        """Gives the parameters memory, and fills them as the prototxt says, from torch's generator."""
        self.furnishing.materialise()

    # -- calling ----------------------------------------------------------------------------------------------------

    def forward(self, *values: Any, **named: Any) -> Outputs:
        given = self._given(values, named)
        if not self.is_ready:
            self._adapt(given)
        self.blobs = {}
        blobs: dict[str, Tensor] = {}
        unread: dict[str, None] = {}
        loss: Tensor | None = None
        for node in self.nodes:
            made = self.layer_of(node)
            if isinstance(made, InputLayer):
                tops: Any = tuple(given[top] for top in node.tops if top in given)
                names = [top for top in node.tops if top in given]
            else:
                if missing := [name for name in node.bottoms if name not in blobs]:
                    if not made.needs_labels:
                        raise DataError(f"layer {node.name!r} reads blob {missing[0]!r}, which was not given")
                    continue
                tops = _run(
                    self.definition,
                    node,
                    made,
                    [
                        blobs[name] if passed else blobs[name].detach()
                        for name, passed in zip(node.bottoms, node.propagates, strict=True)
                    ],
                )
                names = list(node.tops) or ([AUTOMATIC] if made.is_loss else [])
                for name in node.bottoms:
                    unread.pop(name, None)
            tops = tops if isinstance(tops, tuple) else (tops,)
            for position, (name, top) in enumerate(zip(names, tops, strict=False)):
                blobs[name] = top
                unread[name] = None
                if weight := node.loss_weight(position, made.is_loss):
                    term = top.sum() * weight
                    loss = term if loss is None else loss + term
        self.blobs = {name: blob for name, blob in blobs.items() if isinstance(blob, Tensor)}  # nothing of torch.fx
        return outputs_of({name: blobs[name] for name in unread}, loss)

    def _given(self, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Tensor]:
        inputs = self.inputs
        if len(values) > len(inputs):
            raise DataError(f"{len(values)} inputs are given; the net takes {', '.join(inputs) or 'none'}")
        for name in named:
            if name not in inputs:
                raise DataError(f"{name!r} is no input of the net. {nearest(name, inputs)}")
        found = dict(zip(inputs, values, strict=False)) | named
        like = next(self.parameters(), None)
        dtype = torch.float32 if like is None else like.dtype
        return {name: as_numbers(value, dtype) for name, value in found.items()}

    def _adapt(self, given: dict[str, Tensor]) -> None:
        """Learns shapes from the first call where the prototxt told none."""
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        for nodes in self._nodes.values():
            for node in nodes:
                made = self.layer_of(node)
                if isinstance(made, InputLayer) and len(node.tops) > 1 and node.tops[0] in shapes:
                    for top in node.tops[1:]:
                        shapes.setdefault(top, (shapes[node.tops[0]][0],))
        self.prepare(shapes)
        if not self.is_ready:
            lacking = [name for name in self.inputs if name not in self.known_shapes() | shapes]
            raise DataError(f"the shapes of {', '.join(lacking)} are not known; give them, or call load with shapes=")
        self.materialise()

    # -- travelling -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"blobs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.furnishing.mark()

    def extra_repr(self) -> str:
        return f"name={self.name!r}, inputs={self.inputs}"


def _run(definition: Definition, node: Node, made: Layer, bottoms: list[Tensor]) -> Any:
    try:
        return made(*bottoms)
    except ConfigError as error:
        raise definition.error(node.index, str(error)) from error
    except SHAPE_ERRORS as error:
        shapes = [tuple(b.shape) for b in bottoms]
        raise DataError(str(definition.error(node.index, f"with bottoms {shapes}: {error}"))) from error


def _unused(name: str, taken: dict[str, int]) -> str:
    """A layer's name as part of a state dict's keys, and no other layer's; notes how often it was asked for."""
    plain = name.replace(".", "_")
    number = taken.get(plain, 0) + 1
    while (key := plain if number == 1 else f"{plain}_{number}") in taken and number > 1:
        number += 1
    taken[plain] = number
    taken.setdefault(key, 1)
    return key
