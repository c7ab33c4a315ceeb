"""A simulated cluster: real strategies, real gradients and the real exchange, in virtual time."""

from thinwire.cluster.simulated.cluster import Fault, Simulated

__all__ = ["Fault", "Simulated"]
