"""Which layer of a network is placed how on a group of workers, and what that costs, before anything is spent."""

from __future__ import annotations

from thinwire.planning.graph import Graph, Layer, graph_of, graph_on
from thinwire.planning.partition import Partitionable, Share
from thinwire.planning.planner import Connection, Machine, Placed, Plan, connections, plan, pure
from thinwire.planning.profile import profiled

__all__ = [
    "Connection",
    "Graph",
    "Layer",
    "Machine",
    "Partitionable",
    "Placed",
    "Plan",
    "Share",
    "connections",
    "graph_of",
    "graph_on",
    "plan",
    "profiled",
    "pure",
]
