"""For tests and for trying things out: a loop without a cluster, a network without a network."""

from thinwire.testing.testbed import Testbed, TestbedError

__all__ = ["Testbed", "TestbedError"]
