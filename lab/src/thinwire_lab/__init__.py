"""What thinwire is measured and tested with: benchmarks, emulated networks, fault injection, schedules of faults.

A package of its own, since no executor that trains needs any of it. `thinwire bench` and `thinwire testbed` are its
commands; thinwire finds them by this package's entry points.
"""

from thinwire_lab.sparkbed import SparkBed
from thinwire_lab.testbed import Testbed, TestbedError

__all__ = ["SparkBed", "Testbed", "TestbedError"]
