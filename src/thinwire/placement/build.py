"""Builds one member's network from a traced network and a placement for each layer."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire.errors import ConfigError
from thinwire.placement.crew import Crew, bounds
from thinwire.placement.deferred import kept_generators, network_of
from thinwire.placement.kinds import Pipeline, Placement
from thinwire.placement.layers import Partitioned, Recurrent, Rowwise, Share, clone, shares
from thinwire.placement.moves import Move, Shape
from thinwire.placement.portions import Portion, whole
from thinwire.planning.graph import RECURRENT, Graph, Layer
from thinwire.planning.partition import Partitionable, is_partitionable, partition_of
from thinwire.planning.planner import WAYS, Connection, connections
from thinwire.planning.tracing import is_layer, traced_of
from thinwire.replicas.calls import takes_names
from thinwire.replicas.hooks import hooked

REMEDY = "use layers that know their mode, such as nn.Dropout and nn.BatchNorm2d, instead of functions of self.training"
Value = Callable[[Tensor], Tensor]
_Sort = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Parts:
    """A member's network, with the portion of the whole network that each tensor is."""

    module: fx.GraphModule
    shares: list[tuple[Portion, Tensor]] = field(default_factory=list)
    """Parameters and buffers of which this member has a share."""
    copies: list[tuple[Portion, Tensor]] = field(default_factory=list)
    """Parameters and buffers of which every member has a full copy, if the network's state dict has them."""


class _Builder:
    def __init__(self, graph: Graph, ways: Sequence[str], crew: Crew, value: Value, off: frozenset[str]) -> None:
        assert graph.traced is not None
        self._graph, self._ways, self._crew, self._value = graph, ways, crew, value
        self._traced = graph.traced
        self._modules = dict(graph.traced.named_modules(remove_duplicate=False))
        self._sources: dict[int, list[int]] = {}
        for before, after in graph.edges:
            self._sources.setdefault(after, []).append(before)
        self._connections: dict[tuple[int, int], list[Connection]] = {}
        for each in connections(graph, ways):
            self._connections.setdefault((each.source, each.target), []).append(each)
        self._off = off
        self._root: dict[str, Any] = {}
        self._made: dict[int, Any] = {}
        self._shares: list[tuple[Portion, Tensor]] = []
        self._copies: list[tuple[Portion, Tensor]] = []

    def build(self) -> Parts:
        found, old = fx.Graph(), self._traced.graph
        env: dict[fx.Node, fx.Node] = {}
        for node in old.nodes:
            place = self._graph.places.get(node.name)
            moved = dict(env)
            if place is not None and self._graph.layers[place].node == node.name:
                for before in node.all_input_nodes:
                    moved[before] = self._redistributed(found, env[before], before, place)
                if node.op == "call_module":
                    self._add_layer(str(node.target), place)
            elif node.op == "call_module":
                self._root.setdefault(str(node.target), self._copied(self._modules[node.target], str(node.target)))
            if node.op == "get_attr":
                self._root.setdefault(str(node.target), self._attribute(str(node.target)))
            env[node] = self._copy_node(found, node, moved)
        return Parts(fx.GraphModule(self._root, found), self._shares, self._copies)

    def _copy_node(self, found: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copies a node to the new graph. Functional dropout becomes a module, because tracing fixed its mode."""
        if node.name not in self._off:
            return found.node_copy(node, lambda n: values[n])
        share: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        self._root[f"{node.name}_layer"] = nn.Dropout(float(share))
        return found.call_module(f"{node.name}_layer", (values[node.all_input_nodes[0]],))

    # -- borders ----------------------------------------------------------------------------------------------------

    def _redistributed(self, found: fx.Graph, value: fx.Node, before: fx.Node, place: int) -> fx.Node:
        """A node's value, redistributed as the layer at a place needs it."""
        source = self._graph.places.get(before.name)
        if source is None or source == place:
            return value
        first, second = self._graph.layers[source], self._graph.layers[place]
        for _, _, given, wanted in self._connections.get((source, place), ()):
            name = f"{before.name}_for_{second.node}_{given}"
            self._root[name] = Move(self._crew, self._shape(first, second, given, wanted), given, wanted)
            value = found.call_module(name, (value,))
        return value

    def _shape(self, first: Layer, second: Layer, given: str, wanted: str) -> Shape:
        nothing = (0,) * (self._crew.size + 1)
        if given == "features":
            return Shape(first.batch_dim, first.feature_dim or 0, self._borders(first))
        if wanted == "features":
            return Shape(first.batch_dim, second.wanted_dim or 0, self._entering(first, second))
        return Shape(first.batch_dim, 0, nothing)

    def _borders(self, layer: Layer) -> tuple[int, ...]:
        return tuple(bounds(layer.width // layer.grain, self._crew.size, layer.grain))

    def _entering(self, first: Layer, second: Layer) -> tuple[int, ...]:
        """Borders of the members' shares of a layer's input."""
        alike = second.kind == "channels" or second.units_in * first.grain == first.width
        if alike and first.feature_dim == second.wanted_dim:
            return self._borders(first)
        return tuple(bounds(second.units_in, self._crew.size))

    # -- layers -----------------------------------------------------------------------------------------------------

    def _add_layer(self, target: str, place: int) -> None:
        if target in self._root:
            return
        layer, way = self._graph.layers[place], self._ways[place]
        module = self._modules[target]
        if WAYS[way] == ("rows", "rows"):
            self._root[target] = self._copied(module, target)
            return
        out = self._borders(layer)
        if is_partitionable(module):
            self._root[target] = self._custom(module, target, Shape(layer.batch_dim, layer.feature_dim or 0, out))
            return
        if way == "row":
            borders = self._entering(self._graph.layers[self._sources[place][0]], layer)
        else:
            borders = out
        me = self._crew.part
        made = self._shared(module, target, shares(module, way, (borders[me], borders[me + 1])))
        shape = Shape(layer.batch_dim, layer.feature_dim or 0, out)
        if way == "row":
            self._root[target] = Rowwise(made, self._crew, shape)
        elif isinstance(made, RECURRENT):
            self._root[target] = Recurrent(made, self._crew, shape)
        else:
            self._root[target] = made

    def _custom(self, module: nn.Module, path: str, shape: Shape) -> nn.Module:
        """A custom layer, with the share of its tensors that it asks for."""
        assert isinstance(module, Partitionable)
        start, stop = shape.borders[self._crew.part : self._crew.part + 2]
        found = self._shared(module, path, partition_of(module, start, stop))
        return Partitioned(found, self._crew, shape)

    def _shared(self, module: nn.Module, path: str, own: dict[str, Share], within: str = "") -> nn.Module:
        """A layer and its sublayers, with this member's share of their tensors."""
        found = _loosened(module)
        for name, tensor in _tensors(module):
            full = f"{path}.{name}"
            if within + name in own:
                dim, ranges = own[within + name]
                made = self._cut(tensor, Portion(full, tuple(tensor.shape), dim, ranges))
            else:
                made = self._copy(tensor, full)
            _set(found, name, made)
        found._modules = {
            name: None if each is None else self._shared(each, f"{path}.{name}", own, f"{within}{name}.")
            for name, each in module._modules.items()
        }
        return found

    def _cut(self, tensor: Tensor, portion: Portion) -> Tensor:
        if id(tensor) not in self._made:  # a tensor may have two names in one layer
            made = self._made[id(tensor)] = _like(tensor, portion.take(self._value(tensor)))
            self._shares.append((portion, made))
        known: Tensor = self._made[id(tensor)]
        return known

    def _copied(self, module: nn.Module, path: str) -> nn.Module:
        """A layer and its sublayers, with full copies of their tensors."""
        if id(module) in self._made:
            known: nn.Module = self._made[id(module)]
            return known
        found = _loosened(module)
        self._made[id(module)] = found
        for name, tensor in _tensors(module):
            _set(found, name, self._copy(tensor, f"{path}.{name}"))
        found._modules = {
            name: None if each is None else self._copied(each, f"{path}.{name}")
            for name, each in module._modules.items()
        }
        return found

    def _copy(self, tensor: Tensor, name: str) -> Tensor:
        if id(tensor) not in self._made:
            made = self._made[id(tensor)] = _like(tensor, self._value(tensor).clone())
            if name in self._graph.state or isinstance(tensor, nn.Parameter):
                self._copies.append((whole(name, tensor), made))
        known: Tensor = self._made[id(tensor)]
        return known

    def _attribute(self, path: str) -> Any:
        value = operator.attrgetter(path)(self._traced)
        return self._copy(value, path) if isinstance(value, Tensor) else value

    def stage(self, first: int, last: int) -> tuple[Parts, list[_Sort], list[_Sort]]:
        """The nodes from `first` to `last` as a network, with the shapes and types of its inputs and outputs."""
        nodes = [node for node in self._traced.graph.nodes if node.op != "output"]
        final = next(node for node in self._traced.graph.nodes if node.op == "output")
        inside = nodes[first:last]
        found = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        entering = [] if first == 0 else [n for n in nodes[:first] if any(u in inside for u in n.users)]
        entering = [n for n in entering if n.op != "get_attr"]
        for node in entering:
            env[node] = found.placeholder(node.name)
        for node in inside:
            for value in node.all_input_nodes:
                if value not in env:  # an attribute that an earlier stage has fetched
                    self._root.setdefault(str(value.target), self._attribute(str(value.target)))
                    env[value] = found.node_copy(value)
            if node.op == "call_module":
                self._root.setdefault(str(node.target), self._copied(self._modules[str(node.target)], str(node.target)))
            elif node.op == "get_attr":
                self._root.setdefault(str(node.target), self._attribute(str(node.target)))
            env[node] = self._copy_node(found, node, env)
        if last == len(nodes):
            leaving = list(final.all_input_nodes)
            found.node_copy(final, lambda n: env[n])
        else:
            after = {*nodes[last:], final}
            leaving = [n for n in inside if n.op != "get_attr" and any(u in after for u in n.users)]
            found.output(found.call_method("contiguous", (env[leaving[0]],)))
        parts = Parts(fx.GraphModule(self._root, found), self._shares, self._copies)
        inputs = entering if first else [n for n in nodes if n.op == "placeholder"]
        return parts, [self._graph.sorts[n.name] for n in inputs], [self._graph.sorts[n.name] for n in leaving]


def build(graph: Graph, ways: Sequence[str], crew: Crew, value: Value, off: frozenset[str] = frozenset()) -> Parts:
    """This member's part of a network. `value` returns the values of one tensor; `off` is the result of `switched`."""
    return _Builder(graph, ways, crew, value, off).build()


def switched(module: nn.Module, inputs: int | None = None) -> frozenset[str]:
    """The nodes of functional dropout that evaluation turns off; refuses networks that differ otherwise in evaluation.

    Tracing records one mode only. Layers such as nn.Dropout check their mode when they run.
    """
    modes, read = {m: m.training for m in module.modules()}, []
    try:
        for mode in (True, False):
            module.train(mode)
            read.append(traced_of(module, inputs))
    finally:
        for each, training in modes.items():
            each.training = training
    found = []
    for one, other in itertools.zip_longest(*(each.graph.nodes for each in read)):
        if one is None or other is None or str((one.op, one.target)) != str((other.op, other.target)):
            raise ConfigError(
                f"{type(module).__name__} behaves differently in evaluation than in training, at "
                f"{one or other}; {REMEDY}"
            )
        if one.op == "get_attr" and not _same(*(operator.attrgetter(str(one.target))(each) for each in read)):
            raise ConfigError(
                f"{one.target} in {type(module).__name__} depends on the mode (training or not); {REMEDY}"
            )
        if str((one.args, one.kwargs)) != str((other.args, other.kwargs)):
            if one.target is not nn.functional.dropout:
                raise ConfigError(
                    f"{one.name} in {type(module).__name__} depends on the mode (training or not); {REMEDY}"
                )
            found.append(one.name)
    return frozenset(found)


def _same(one: Any, other: Any) -> bool:
    """Whether two traces of a network have the same tensor at a place."""
    if one is other or not isinstance(one, Tensor):
        return True
    return one.device.type == "meta" or torch.equal(one, other)


def refuse_unreadable(placement: Placement, model: nn.Module | Callable[[], nn.Module], seed: int, inputs: int) -> None:
    """Refuses a network that this placement cannot run, before a worker starts.

    Args:
        placement: the placement.
        model: the network, or its factory.
        seed: the seed of the factory.
        inputs: number of inputs with which the network is called.
    """
    if not placement.shares:
        return
    with kept_generators():
        network, _ = network_of(model, seed)
        for each in network.modules():
            if reason := "its inputs are passed by name" if takes_names(each) else getattr(each, "only_whole", ""):
                raise ConfigError(f"{type(each).__name__} cannot be placed: {reason}; use placement=tw.Whole()")
        _refuse_parameters(network)
        _refuse_hooks(network)
        switched(network, inputs)
        (end,) = [node for node in traced_of(network, inputs).graph.nodes if node.op == "output"]
    if isinstance(placement, Pipeline) and not isinstance(end.args[0], fx.Node):
        raise ConfigError(
            f"{type(network).__name__} gives several values, and the last stage of a pipeline gives one tensor; use "
            "placement=tw.Planned(…), or give one tensor"
        )


def _refuse_parameters(network: nn.Module) -> None:
    """Refuses parameters whose type, or whose hooks, members' shares of them would not have."""
    names = hooked(network)
    if names:
        raise ConfigError(
            f"parameter {names[0]!r} of {type(network).__name__} has a hook on its gradient, and a placement gives "
            "members shares of the parameters; leave the hook out, or use placement=tw.Whole()"
        )
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, and a placement trains float32: model.float(), or "
                "placement=tw.Whole()"
            )


def _refuse_hooks(network: nn.Module) -> None:
    """Refuses hooks that a placed network would not have: it is made of the layers that the whole one calls."""
    for name, module in network.named_modules():
        around = module._backward_hooks or module._backward_pre_hooks
        around = around or (module is network and (module._forward_hooks or module._forward_pre_hooks))
        if around and not is_layer(module, name):
            raise ConfigError(
                f"{type(module).__name__} has a hook, and a placement calls the layers inside it; put the hook on a "
                "layer of torch.nn, or use placement=tw.Whole()"
            )


def stage_of(
    graph: Graph, first: int, last: int, crew: Crew, value: Value, off: frozenset[str] = frozenset()
) -> tuple[Parts, list[_Sort], list[_Sort]]:
    """A range of a network's nodes, with the shapes and types of its inputs and outputs."""
    return _Builder(graph, ["rows"] * len(graph.layers), crew, value, off).stage(first, last)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in found if tensor is not None]


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _loosened(module: nn.Module) -> nn.Module:
    found = clone(module)
    if isinstance(module, nn.RNNBase):
        vars(found)["_flat_weights"] = list(module._flat_weights)
    return found


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)
