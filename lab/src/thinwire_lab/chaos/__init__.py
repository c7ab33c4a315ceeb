"""Fault injection into runs of real processes; see `thinwire testbed chaos`."""

from thinwire_lab.chaos.faults import ARENAS
from thinwire_lab.chaos.trial import Report, Trial

__all__ = ["ARENAS", "Trial", "Report"]
