"""The size of groups: computing, the exchange within a group and the exchange between groups, weighed together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.planning import Between, Graph, Machine, graph_of, plan, sizes_of
from thinwire.rules.placement import Wire

WORKERS, BATCH = 8, 4


def connected(width: int = 512) -> Graph:
    with torch.device("meta"):
        return graph_of(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)), (width,))


def machine(memory_bytes: float | None = None, bytes_per_s: float = 1e7) -> Machine:
    return Machine(1e10, memory_bytes, Wire(1e-5, bytes_per_s))


def test_every_size_that_divides_the_workers_is_weighed() -> None:
    graph, each = connected(), machine()
    found = sizes_of(graph, WORKERS, BATCH, machine=each, between=Between())
    assert [p.group for p in found] == [1, 2, 4, 8]
    for p in found:
        assert p.step_s == plan(graph, p.group, BATCH * p.group, each).step_s
        replicas = WORKERS // p.group
        sent = 2 * 4 * graph.parameters / p.group * (replicas - 1) / replicas
        assert p.between.sent_bytes == pytest.approx(sent)
        assert p.between_s == pytest.approx(sent / 1e7 + 1e-5 * p.between.messages)
        assert p.total_s == p.compute_s + p.exchange_s + p.between_s


def test_large_layers_and_an_exchange_at_every_step_ask_for_groups_and_rare_exchanges_do_not() -> None:
    def best(between: Between) -> int:
        found = sizes_of(connected(), WORKERS, BATCH, machine=machine(), between=between)
        return min(found, key=lambda p: p.total_s).group

    assert best(Between()) == 8
    assert best(Between(period=10_000)) == 1


def test_an_exchange_that_steps_do_not_wait_for_costs_what_is_longer_than_a_step() -> None:
    (one, *_) = sizes_of(connected(), WORKERS, BATCH, machine=machine(), between=Between(waits=False))
    (waiting, *_) = sizes_of(connected(), WORKERS, BATCH, machine=machine(), between=Between())
    assert one.between_s > 0
    assert one.between_s == pytest.approx(waiting.between_s - one.step_s)
    fast = sizes_of(connected(), WORKERS, BATCH, machine=machine(bytes_per_s=1e14), between=Between(waits=False))
    assert fast[0].between_s < waiting.between_s


def test_sizes_that_a_replica_does_not_fit_into_are_left_out() -> None:
    graph = connected()
    whole = sizes_of(graph, WORKERS, BATCH, machine=machine(), between=Between())[0].memory_bytes
    found = sizes_of(graph, WORKERS, BATCH, machine=machine(0.6 * whole), between=Between(period=10_000))
    assert [p.group for p in found] == [2, 4, 8]
    with pytest.raises(ConfigError, match="the most frugal one needs"):
        sizes_of(graph, WORKERS, BATCH, machine=machine(1000.0), between=Between())
