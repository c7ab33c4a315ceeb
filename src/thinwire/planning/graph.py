"""A network as a planner sees it: layers with parameters, features and operations, and the edges between them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.errors import ConfigError
from thinwire.planning.partition import is_partitionable
from thinwire.planning.tracing import MetaInterpreter, first_tensor, traced_of, without_memory

Kind = Literal["input", "split", "channels", "rows"]
"""How a layer can be placed on a group. "split": its parameters can be split by outputs or inputs. "channels": it works
on each feature or channel separately. "rows": it needs all features of a row, or its parameters cannot be split."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_EACH = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Hardtanh, nn.Identity,
    nn.Dropout,
)  # fmt: skip
"""Layers that work on each number separately, whatever the dimension of the features."""
_SECOND = (
    nn.Dropout1d, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.ZeroPad2d,
)  # fmt: skip
"""Layers that work on each channel separately, with channels in the second dimension."""
_EACH_OF: set[Any] = {
    operator.add,
    operator.iadd,
    operator.mul,
    torch.add,
    torch.mul,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
}
_EACH_OF |= {nn.functional.relu, nn.functional.dropout, nn.functional.gelu, "relu", "add", "mul", "tanh", "sigmoid"}
_EACH_OF |= {"contiguous", torch.sigmoid}
_SECOND_OF: set[Any] = {nn.functional.max_pool2d, nn.functional.avg_pool2d}
_FLAT: set[Any] = {torch.flatten, "flatten"}


@dataclass(frozen=True)
class Layer:
    """One layer; quantities that depend on rows are given for one row."""

    name: str
    what: str
    kind: Kind
    parameters: int = 0
    features: float = 0
    """Floats in its output."""
    inputs: float = 0
    """Floats in its input."""
    flops: float = 0.0
    """Operations of the forward and backward pass together."""
    outputs: int = 1
    """Outputs or channels by which its parameters or its work can be split."""
    units_in: int = 1
    """Units of its input by which the parameters of a "split" layer can also be split; 0 where they cannot."""
    whole: int = 0
    """Parameters that each worker holds in full, however the layer is placed."""
    gathered: tuple[float, int] = (0.0, 0)
    """If outputs are split: floats that a worker receives while the layer runs, and the number of gathers."""
    seconds: float | None = None
    """Measured seconds of the forward and backward pass; None without a measurement."""
    shared_seconds: float | None = None
    """Measured seconds on a worker that has its share of the outputs, for one row of the whole group."""
    node: str = ""
    """Name of its node in the traced network."""
    batch_dim: int = 0
    feature_dim: int | None = None
    """The dimension of features or channels in its output."""
    wanted_dim: int | None = None
    """The dimension of features or channels that it needs in its input."""
    width: int = 0
    """Size of its output in that dimension."""
    grain: int = 1
    """Neighbouring numbers in that dimension that form one unit: flattened channels stay together."""
    pinned: bool = False
    """Whether its output must be laid out by rows, because the program uses its shape."""


@dataclass
class Graph:
    """The layers in execution order, and the edges between them."""

    layers: list[Layer] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    traced: fx.GraphModule | None = None
    places: dict[str, int] = field(default_factory=dict)
    """By node of the traced network, the layer whose output the node's value is."""
    sorts: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """By node, shape and type of its value, for the example rows."""
    state: frozenset[str] = frozenset()
    """Names of the tensors in the network's state dict."""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def features(self) -> float:
        return sum(layer.features for layer in self.layers)


def graph_of(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, rows: int = 2) -> Graph:
    """The graph of a network. Nothing is computed, so the network may be larger than this machine's memory.

    Args:
        module: the network; its parameters may be on the device "meta".
        shape: shape of one row of its input.
        dtype: type of its input.
        rows: number of example rows.
    """
    return graph_on(module, [torch.empty(rows, *shape, dtype=dtype, device="meta")])


def graph_on(module: nn.Module, examples: Sequence[Tensor]) -> Graph:
    """The graph of a network for inputs like the examples, of which only shapes and types are used."""
    traced = traced_of(module, len(examples))
    for node in list(traced.graph.nodes):
        if node.target is operator.getitem and not node.users:  # an unused part of an unpacked tuple
            traced.graph.erase_node(node)
    empty, rows = without_memory(traced), examples[0].shape[0]
    runs: list[MetaInterpreter] = []
    try:
        more = [torch.empty(rows + 1, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples]
        runs.append(other := _Shapes(empty))
        other.run(*more)
        runs.append(walker := _Walker(empty, rows, other.shapes))
        walker.run(*(x.to("meta") for x in examples))
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape[1:])) for x in examples)
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{type(module).__name__} does not take rows of shape {shapes}: {runs[-1].at}{type(error).__name__}: {said}"
        ) from error
    walker.seen.traced, walker.seen.state = traced, frozenset(module.state_dict())
    return walker.seen


class _Shapes(MetaInterpreter):
    """Runs a network on meta tensors, and records the shape of every value."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        first = first_tensor(found)
        if first is not None:
            self.shapes[n] = tuple(first.shape)
        return found


class _Walker(MetaInterpreter):
    """Runs a network on meta tensors, and records the properties of each layer."""

    def __init__(self, traced: fx.GraphModule, rows: int, others: dict[fx.Node, tuple[int, ...]]) -> None:
        super().__init__(traced)
        self._rows, self._others, self._place = rows, others, dict[fx.Node, int]()
        self._uses = _uses(traced)
        self.seen = Graph()

    def run_node(self, n: fx.Node) -> Any:
        flops = 0
        if self._is_counted(n):
            with FlopCounterMode(display=False) as counter:
                found = super().run_node(n)
            flops = counter.get_total_flops()
        else:
            found = super().run_node(n)
        main = first_tensor(found) if n.op == "call_module" else found
        if isinstance(found, Tensor):
            self.seen.sorts[n.name] = tuple(found.shape), found.dtype
        sources = sorted({place for node in n.all_input_nodes if (place := self._of(node)) is not None})
        first = n.args[0] if n.target is operator.getitem else None
        if isinstance(first, fx.Node) and first.op == "call_module" and n.args[1] == 0 and isinstance(main, Tensor):
            self._place[n] = self.seen.places[n.name] = sources[0]  # the first output of a recurrent layer
            return found
        if n.op == "get_attr" or not (isinstance(main, Tensor) or n.op == "output"):
            for source in sources:  # values that are not one tensor are not redistributed, so their inputs stay by rows
                self.seen.layers[source] = replace(self.seen.layers[source], pinned=True)
            return found
        if n.op == "output":
            layer = Layer("output", "output", "rows", node=n.name)
        else:
            assert isinstance(main, Tensor)
            layer = self._layer(n, main, sources, flops)
        self._place[n] = self.seen.places[n.name] = len(self.seen.layers)
        self.seen.layers.append(layer)
        self.seen.edges += [(source, self._place[n]) for source in sources]
        return found

    def _is_counted(self, n: fx.Node) -> bool:
        """Whether operations have to be counted during execution, because no formula is known."""
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            return not isinstance(module, (nn.Linear, *CONVOLUTIONS, *RECURRENT, *_EACH, *_SECOND))
        return n.op in ("call_function", "call_method") and n.target not in _EACH_OF | _SECOND_OF | _FLAT

    def _of(self, node: fx.Node) -> int | None:
        """The layer that a value comes from; a value that is not a tensor has the layer of its own input."""
        if node in self._place:
            return self._place[node]
        places = [place for each in node.all_input_nodes if (place := self._of(each)) is not None]
        return max(places) if places else None

    def _layer(self, n: fx.Node, found: Tensor, sources: list[int], flops: float) -> Layer:
        features = found.numel() / self._rows * found.element_size() / 4
        before = [self.seen.layers[source] for source in sources]
        moves = [d for d, (a, b) in enumerate(zip(found.shape, self._others[n], strict=True)) if a != b]
        layer = Layer(
            name=n.name,
            what="input",
            kind="input",
            features=features,
            inputs=sum(each.features for each in before),
            node=n.name,
            batch_dim=moves[0] if moves else 0,
            feature_dim=1 if found.dim() > 1 else None,
            width=found.shape[1] if found.dim() > 1 else 0,
        )
        if n.op == "placeholder":
            return layer
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        own = [] if module is None else list(module.parameters())
        own += [p for a in n.all_input_nodes if a.op == "get_attr" and isinstance(p := self._attr(a), nn.Parameter)]
        forward = flops / self._rows or _flops(module, found, self._rows) or features
        layer = replace(
            layer,
            name=str(n.target) if module is not None else n.name,
            what=type(module).__name__ if module is not None else getattr(n.target, "__name__", str(n.target)),
            kind="rows",
            parameters=sum(p.numel() for p in own if self._uses[p][0] == n),
            flops=3 * forward,  # the backward pass takes about twice as long
            feature_dim=None,
        )
        shared = any(len(self._uses[p]) > 1 for p in own)  # each use would need the same layout
        if _in_place(n, module) and any(len(a.users) > 1 for a in n.all_input_nodes):
            for place in sources:  # other readers must see the in-place write, so its input must not be redistributed
                self.seen.layers[place] = replace(self.seen.layers[place], pinned=True)
            return layer
        if shared or not moves or len(moves) > 1:
            return layer
        if module is not None and is_partitionable(module) and n.name in self.seen.sorts:
            return _custom(layer, module, found)
        if module is not None and not _is_plain(module):
            return layer
        if module is not None:
            layer = _split(layer, n, module, found, before)
        return layer if layer.kind == "split" else _as_channels(layer, n, module, found, before)

    def _attr(self, node: fx.Node) -> Any:
        return self.fetch_attr(str(node.target))


def _uses(traced: fx.GraphModule) -> dict[nn.Parameter, list[fx.Node]]:
    """By parameter, the nodes that use it."""
    found: dict[nn.Parameter, list[fx.Node]] = {}
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op == "call_module":
            for parameter in modules[str(node.target)].parameters():
                found.setdefault(parameter, []).append(node)
        elif node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(traced)
            if isinstance(value, nn.Parameter):
                found.setdefault(value, []).extend(node.users)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer behaves as its class defines, without hooks or parametrizations."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not module._modules


def _split(layer: Layer, n: fx.Node, module: nn.Module, found: Tensor, before: Sequence[Layer]) -> Layer:
    """A layer as "split" where its parameters can be split; else unchanged."""
    last = found.dim() - 1
    source = before[0] if len(before) == 1 else None
    if isinstance(module, nn.Linear):
        outputs, dim, wide = module.out_features, last, module.in_features
        bias = 0 if module.bias is None else outputs
    elif isinstance(module, CONVOLUTIONS) and module.groups == 1:
        outputs, dim, wide = module.out_channels, 1, module.in_channels
        bias = 0 if module.bias is None else outputs
    elif isinstance(module, nn.Embedding) and module.max_norm is None:
        return replace(layer, kind="split", outputs=module.embedding_dim, feature_dim=last, width=found.shape[last],
                       units_in=0)  # fmt: skip
    elif isinstance(module, RECURRENT) and not module.proj_size and found.dim() == 3:
        hidden, outputs_only = module.hidden_size, all(u.args[1:] == (0,) for u in n.users)
        if module.bidirectional or not outputs_only or len(n.args) > 1:  # the last states have another layout
            return layer
        if module.dropout and module.num_layers > 1:  # all members would have to draw the same mask
            return layer
        long = found.shape[1 - layer.batch_dim]
        count = long * module.num_layers - 1
        return replace(layer, kind="split", outputs=hidden, feature_dim=last, width=hidden, units_in=0,
                       gathered=(float(count * hidden), count))  # fmt: skip
    else:
        return layer
    alike = source is not None and source.feature_dim == dim and source.width == wide
    units = wide // source.grain if alike and source is not None else wide
    return replace(layer, kind="split", outputs=outputs, feature_dim=dim, wanted_dim=dim, width=outputs,
                   units_in=units, whole=bias)  # fmt: skip


def _custom(layer: Layer, module: nn.Module, found: Tensor) -> Layer:
    """A custom layer that defines how its outputs are split."""
    asked = getattr(module, "partition_dim", -1)
    if not -found.dim() <= asked < found.dim() or asked % found.dim() == layer.batch_dim:
        raise ConfigError(
            f"{type(module).__name__}.partition_dim = {asked}: its output {tuple(found.shape)} has rows in dimension "
            f"{layer.batch_dim}; name another dimension of it"
        )
    dim = asked % found.dim()
    told: Any = getattr(module, "gathered", None)
    sent = told(tuple(found.shape)) if callable(told) else (0.0, 0)
    units = found.shape[dim]
    return replace(layer, kind="split", outputs=units, feature_dim=dim, width=units, units_in=0,
                   gathered=(float(sent[0]), int(sent[1])))  # fmt: skip


def _as_channels(layer: Layer, n: fx.Node, module: nn.Module | None, found: Tensor, before: Sequence[Layer]) -> Layer:
    """A layer as "channels" where it works on each feature or channel separately; else unchanged."""
    if not before or any(s.feature_dim is None or s.batch_dim != before[0].batch_dim for s in before):
        return layer
    source, what = before[0], n.target if module is None else None
    dim: int | None = source.feature_dim
    assert dim is not None
    if any((s.feature_dim, s.width, s.grain) != (dim, source.width, source.grain) for s in before):
        return layer
    grain = source.grain
    plain = n.op != "get_attr" and not any(a.op == "get_attr" for a in n.all_input_nodes)
    if isinstance(module, _EACH) or (plain and what in _EACH_OF):
        fits = dim < found.dim() and found.shape[dim] == source.width
    elif isinstance(module, _SECOND) or (plain and what in _SECOND_OF):
        fits = dim == 1 and source.batch_dim == 0 and found.dim() in _ranks(module)
        fits = fits and found.shape[1] == source.width and not getattr(module, "return_indices", False)
    elif isinstance(module, nn.Flatten) or (plain and what in _FLAT):
        begins = module.start_dim if isinstance(module, nn.Flatten) else _argument(n, 1, "start_dim", 0)
        fits = dim == 1 == begins and source.batch_dim == 0 and found.dim() == 2
        fits = fits and found.shape[1] % source.width == 0
        grain *= found.shape[-1] // source.width if fits else 1
    elif what is operator.getitem and isinstance(n.args[1], tuple):
        index = n.args[1]
        fits = len(index) <= dim and index[source.batch_dim] == slice(None)
        fits = fits and all(isinstance(i, int | slice) for i in index)
        dim -= sum(isinstance(i, int) for i in index)
    else:
        return layer
    if not fits or found.shape[dim] % grain:
        return layer
    units = found.shape[dim] // grain
    return replace(layer, kind="channels", outputs=units, feature_dim=dim, wanted_dim=source.feature_dim,
                   width=found.shape[dim], grain=grain)  # fmt: skip


def _ranks(module: nn.Module | None) -> tuple[int, ...]:
    """Numbers of dimensions where the second one is channels; pools take an input with another number as one row."""
    if isinstance(module, nn.BatchNorm1d):
        return (2, 3)
    flat = (nn.Dropout1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
    return (3,) if isinstance(module, flat) else (4,)


def _argument(n: fx.Node, place: int, name: str, usual: Any) -> Any:
    return n.args[place] if len(n.args) > place else n.kwargs.get(name, usual)


def _in_place(n: fx.Node, module: nn.Module | None) -> bool:
    return bool(getattr(module, "inplace", False)) or n.target is operator.iadd or n.kwargs.get("inplace") is True


def _flops(module: nn.Module | None, found: Tensor, rows: int) -> float:
    """Operations of a forward pass over one row."""
    features = found.numel() / rows
    if isinstance(module, nn.Linear):
        return 2.0 * features * module.in_features
    if isinstance(module, CONVOLUTIONS):
        return 2.0 * features * math.prod(module.weight.shape[1:])
    if isinstance(module, RECURRENT):
        weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
        return 2.0 * weights * found.numel() / rows / found.shape[-1]
    return 0.0
