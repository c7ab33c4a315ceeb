"""Real processes, and what is done to them on purpose; see `thinwire testbed chaos`."""

from thinwire_lab.chaos.faults import ARENAS
from thinwire_lab.chaos.trial import Report, Trial

__all__ = ["ARENAS", "Trial", "Report"]
