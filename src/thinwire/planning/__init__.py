"""Chooses how each layer of a network is placed on a group of workers, and estimates the cost before a run."""

from __future__ import annotations

from thinwire.planning.graph import Graph, Layer, graph_of, graph_on
from thinwire.planning.partition import Partitionable, Share
from thinwire.planning.planner import (
    Between,
    Connection,
    Machine,
    Placed,
    Plan,
    as_placed,
    connections,
    plan,
    pure,
    sizes_of,
    with_exchange,
)
from thinwire.planning.profile import profiled

__all__ = [
    "Between",
    "Connection",
    "Graph",
    "Layer",
    "Machine",
    "Partitionable",
    "Placed",
    "Plan",
    "Share",
    "as_placed",
    "connections",
    "graph_of",
    "graph_on",
    "plan",
    "profiled",
    "pure",
    "sizes_of",
    "with_exchange",
]
