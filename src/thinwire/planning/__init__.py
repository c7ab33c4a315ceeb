"""Which layer of a network is placed how on a group of workers, and what that costs, before anything is spent."""

from __future__ import annotations

from thinwire.planning.graph import Graph, Layer, graph_of, graph_on
from thinwire.planning.planner import Machine, Placed, Plan, plan, pure
from thinwire.planning.profile import profiled

__all__ = ["Graph", "Layer", "Machine", "Placed", "Plan", "graph_of", "graph_on", "plan", "profiled", "pure"]
