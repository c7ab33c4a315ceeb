"""What tests of distributed code need: a network of nodes on one machine."""

from thinwire.testing.testbed import Testbed, TestbedError

__all__ = ["Testbed", "TestbedError"]
