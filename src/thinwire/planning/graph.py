"""A network as a planner sees it: layers with parameters, features and work, and which feeds which."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.errors import ConfigError

Kind = Literal["input", "split", "channels", "rows"]
"""How a layer may lie on a group: "split" has parameters that can be shared out by outputs or inputs, "channels" works
on each feature or channel alone, "rows" needs all features of a row, or has parameters that cannot be shared out."""

_SPLIT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
_CHANNELS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Hardtanh, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.ZeroPad2d,
)  # fmt: skip
_ALIKE = {operator.add, operator.iadd, operator.mul, torch.add, torch.mul, torch.relu, torch.flatten, torch.tanh}
_ALIKE |= {torch.sigmoid, nn.functional.relu, nn.functional.dropout, nn.functional.max_pool2d, nn.functional.avg_pool2d}
_METHODS = {"flatten", "relu", "add", "mul", "tanh", "sigmoid", "contiguous"}


@dataclass(frozen=True)
class Layer:
    """One layer; what depends on rows is of one row."""

    name: str
    what: str
    kind: Kind
    parameters: int = 0
    features: int = 0
    """Floats of its output."""
    inputs: int = 0
    """Floats of its input."""
    flops: float = 0.0
    """Of forward and backward together."""
    outputs: int = 0
    """Outputs or channels among which its parameters can be shared out."""
    divisible: bool = True
    """Whether its inputs can be shared out too: not those of grouped convolutions, nor an embedding's."""
    seconds: float | None = None
    """Forward and backward, where they were measured."""


@dataclass
class Graph:
    """Layers in the order in which they run, and edges between them."""

    layers: list[Layer] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def features(self) -> int:
        return sum(layer.features for layer in self.layers)


def graph_of(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, rows: int = 2) -> Graph:
    """A network's layers; nothing is computed, so that networks larger than this machine have one too.

    Args:
        module: the network; its parameters may be on the device "meta".
        shape: of one row of its input.
        dtype: of its input.
        rows: how many of them are imagined.
    """
    try:
        traced = fx.symbolic_trace(module)
    except Exception as error:
        raise ConfigError(
            f"the layers of {type(module).__name__} could not be read ({type(error).__name__}: {error}); a plan needs "
            "a network that torch.fx can trace, without branches on values"
        ) from error
    traced = copy.deepcopy(traced).to("meta") if not _is_meta(traced) else traced
    walker = _Walker(traced, rows)
    try:
        walker.run(torch.empty(rows, *shape, dtype=dtype, device="meta"))
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} does not take rows of shape {shape}: {type(error).__name__}: {error}"
        ) from error
    return walker.seen


def _is_meta(module: nn.Module) -> bool:
    return all(p.device.type == "meta" for p in module.parameters())


class _Walker(fx.Interpreter):
    """Runs a network on nothing, and writes down what each layer does."""

    def __init__(self, traced: fx.GraphModule, rows: int) -> None:
        super().__init__(traced)
        self._rows, self._place = rows, dict[fx.Node, int]()
        self.seen = Graph()

    def run_node(self, n: fx.Node) -> Any:
        flops = 0
        if n.op in ("call_function", "call_method") and n.target not in _ALIKE and n.target not in _METHODS:
            with FlopCounterMode(display=False) as counter:
                found = super().run_node(n)
            flops = counter.get_total_flops()
        else:
            found = super().run_node(n)
        if n.op in ("output", "get_attr") or not isinstance(found, Tensor):
            return found
        sources = sorted({place for node in n.all_input_nodes if (place := self._of(node)) is not None})
        layer = self._layer(n, found, sources, flops)
        self._place[n] = len(self.seen.layers)
        self.seen.layers.append(layer)
        self.seen.edges += [(source, self._place[n]) for source in sources]
        return found

    def _of(self, node: fx.Node) -> int | None:
        """The layer that a value comes from; one that is no tensor comes from where its own input does."""
        if node in self._place:
            return self._place[node]
        places = [place for each in node.all_input_nodes if (place := self._of(each)) is not None]
        return max(places) if places else None

    def _layer(self, n: fx.Node, found: Tensor, sources: list[int], flops: float) -> Layer:
        features = found.numel() // self._rows
        inputs = sum(self.seen.layers[source].features for source in sources)
        if n.op == "placeholder":
            return Layer(n.name, "input", "input", features=features)
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        what = type(module).__name__ if module is not None else getattr(n.target, "__name__", str(n.target))
        own = 0 if module is None else sum(p.numel() for p in module.parameters())
        own += sum(self.fetch_attr(str(a.target)).numel() for a in n.all_input_nodes if a.op == "get_attr")
        forward = flops / self._rows or _flops(module, features) or features
        work = 3 * forward  # backward takes about twice as long
        name = str(n.target) if module is not None else n.name
        whole = getattr(module, "groups", 1) == 1 and not isinstance(module, nn.Embedding)
        return Layer(name, what, _kind(n, module), own, features, inputs, work, _outputs(module), whole)


def _kind(n: fx.Node, module: nn.Module | None) -> Kind:
    if isinstance(module, _SPLIT):
        return "split"
    if isinstance(module, _CHANNELS):
        return "channels"
    if module is None and n.op == "call_function":
        joins = n.target is torch.cat and (n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else 0)) == 1
        return "channels" if n.target in _ALIKE or joins else "rows"
    if module is None and n.op == "call_method":
        return "channels" if n.target in _METHODS else "rows"
    return "rows"


def _flops(module: nn.Module | None, features: int) -> float:
    """Of a forward pass over one row."""
    if isinstance(module, nn.Linear):
        return 2.0 * features * module.in_features
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 2.0 * features * module.weight[0].numel()
    return 0.0


def _outputs(module: nn.Module | None) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.out_channels
    return 0
