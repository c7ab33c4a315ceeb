"""Measures the time of each layer, as an alternative to an estimate from its operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire.planning.graph import Graph
from thinwire.planning.tracing import first_tensor, traced_of


def profiled(graph: Graph, module: nn.Module, examples: Sequence[Tensor], group: int = 1, repeats: int = 3) -> Graph:
    """The graph with every layer's seconds for one row on this machine, forward and backward.

    Linear layers and convolutions are also measured as on a worker with a share of the outputs and all rows: the same
    amount of computation, but with a whole input to read.

    Args:
        graph: the network's graph, from `graph_of`.
        module: the network itself, with parameters.
        examples: example rows, as many as a worker has in a step.
        group: workers among which outputs may be split.
        repeats: measurements, of which the median is taken.
    """
    watch = _Watch(traced_of(module, len(examples)), group)
    for _ in range(repeats + 1):  # the first run allocates memory
        watch.run(*examples)
    rows = examples[0].shape[0]
    times = {name: statistics.median(each[1:]) / rows for name, each in watch.seconds.items()}
    shared = {name: statistics.median(each[1:]) / rows / group for name, each in watch.shared.items()}
    layers = [
        replace(layer, seconds=times.get(layer.node, 0.0), shared_seconds=shared.get(layer.node))
        for layer in graph.layers
    ]
    return replace(graph, layers=layers)


def measured_flops() -> float:
    """Floating-point operations a second of this machine on one thread, measured by a matrix product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = torch.randn(768, 768)
        one @ one
        began = time.perf_counter()
        for _ in range(10):
            one @ one
        return 10 * 2 * 768**3 / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)


class _Watch(fx.Interpreter):
    """Runs a network node by node, each followed by its backward pass, and measures the time."""

    def __init__(self, traced: fx.GraphModule, group: int) -> None:
        super().__init__(traced)
        self._group = group
        self.seconds: dict[str, list[float]] = {}
        self.shared: dict[str, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        for given in n.all_input_nodes:
            value = self.env[given]
            learnt = given.op not in ("placeholder", "get_attr")
            if isinstance(value, Tensor) and value.is_floating_point() and learnt:
                self.env[given] = value.detach().requires_grad_()
        began = time.perf_counter()
        found = super().run_node(n)
        main = first_tensor(found)
        if main is not None and main.requires_grad:
            main.backward(torch.ones_like(main))  # type: ignore[no-untyped-call]
        self.seconds.setdefault(n.name, []).append(time.perf_counter() - began)
        self._share(n)
        return fx.node.map_aggregate(found, lambda each: each.detach() if isinstance(each, Tensor) else each)

    def _share(self, n: fx.Node) -> None:
        """Times a layer with a share of the outputs, on the rows of all workers."""
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if self._group == 1 or not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return
        given = self.env[n.all_input_nodes[0]]
        x = given.detach().repeat(self._group, *[1] * (given.dim() - 1)).requires_grad_(given.requires_grad)
        count = max(1, module.weight.shape[0] // self._group)
        weight = module.weight.detach()[:count].clone().requires_grad_()
        bias = None if module.bias is None else module.bias.detach()[:count].clone().requires_grad_()
        began = time.perf_counter()
        if isinstance(module, nn.Linear):
            found = nn.functional.linear(x, weight, bias)
        else:
            found = module._conv_forward(x, weight, bias)
        found.backward(torch.ones_like(found))  # type: ignore[no-untyped-call]
        self.shared.setdefault(n.name, []).append(time.perf_counter() - began)
