"""Tools that measure and test thinwire: benchmarks, emulated networks, fault injection, schedules of faults.

A separate package, because no executor that trains needs them. Its commands are `thinwire bench` and `thinwire
testbed`, which thinwire finds by this package's entry points.
"""

from thinwire_lab.sparkbed import SparkBed
from thinwire_lab.testbed import Testbed, TestbedError

__all__ = ["SparkBed", "Testbed", "TestbedError"]
