"""Which layer of a network is placed how on a group of workers, and what that costs, before anything is spent."""

from __future__ import annotations

from thinwire.planning.graph import Graph, Layer, graph_of

__all__ = ["Graph", "Layer", "graph_of"]
