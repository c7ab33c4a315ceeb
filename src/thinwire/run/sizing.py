"""How many workers one replica spans, where that is left to what a step takes in groups of each size."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.cluster.base import Expected, Site
from thinwire.errors import ConfigError
from thinwire.placement import Layered, Placement, Whole
from thinwire.placement.deferred import kept_generators, network_of
from thinwire.planning import Between, Graph, Plan, graph_on, profiled, sizes_of
from thinwire.planning.profile import measured_flops
from thinwire.replicas.torch import build_module
from thinwire.run.trial import Trial
from thinwire.strategies import Strategy

_log = logging.getLogger("thinwire.run")
TIMED = 50_000_000
"""Networks of more parameters are not timed on the driver: their operations are counted instead."""


class FirstRow:
    """The trial of the data's first row, which keeps what the model was called with."""

    def __init__(self, trial: Trial, *, kept: bool) -> None:
        self._trial, self._kept = trial, kept
        self.inputs: Sequence[Tensor] | None = None

    def __call__(self, row: Any) -> tuple[int, ...] | None:
        found = self._trial(row)
        if self._kept:
            self.inputs = self._trial.inputs(row)
        return found


def between_of(strategy: Strategy) -> Between:
    """How often replicas exchange under a strategy, and whether steps wait for it."""
    period = getattr(strategy, "period", 1)
    return Between(period if isinstance(period, int) else 1, waits=strategy.timing == "barrier")


def sized(placement: Placement, trial: Trial, first: FirstRow, *, where: Site, strategy: Strategy) -> Placement:
    """The placement with the group size in which a step takes least time: computing, within groups and between them.

    Raises:
        ConfigError: It cannot be told, or a replica fits into no group.
    """
    if placement.group_size != "auto":
        return placement
    assert isinstance(placement, Layered)
    if first.inputs is None:
        raise ConfigError(
            "placement.group_size = 'auto' needs to know what the model is called with, and the transform that makes "
            "it is run on workers only; give a number, such as group_size=2"
        )
    expected = where.expect()
    with kept_generators():
        graph, flops = _timed(trial, first.inputs, expected)
    machine = placement.machine(expected.wire, flops)
    found = sizes_of(
        graph, where.workers, trial.batch_size, machine=machine, between=between_of(strategy), planned=placement.planned
    )
    best = min(found, key=lambda each: each.total_s)
    _log.info("groups of %d workers: %s", best.group, "; ".join(_said(each) for each in found))
    return Whole() if best.group == 1 else placement.settled(best.group, machine.wire)


def _timed(trial: Trial, inputs: Sequence[Tensor], expected: Expected) -> tuple[Graph, float | None]:
    """The network's layers, with seconds where they are timed here, or else the operations a second of a worker."""
    network, _ = network_of(trial.model, trial.spec.seed)
    graph = graph_on(network, [torch.empty(2, *x.shape[1:], dtype=x.dtype, device="meta") for x in inputs])
    work = sum(layer.flops for layer in graph.layers) * len(inputs[0])
    step_s = expected.step_s(graph.parameters)
    if step_s is not None:
        return graph, work / step_s if work and step_s else None
    if graph.parameters > TIMED:
        return graph, measured_flops()
    made = trial.model
    module = copy.deepcopy(made) if isinstance(made, nn.Module) else build_module(made, trial.spec.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return profiled(graph, module.cpu(), inputs), None
    finally:
        torch.set_num_threads(threads)


def _said(each: Plan) -> str:
    return (
        f"of {each.group}, {1e3 * each.total_s:.3g} ms a step (computing {1e3 * each.compute_s:.3g}, within groups "
        f"{1e3 * each.exchange_s:.3g}, between them {1e3 * each.between_s:.3g})"
    )
