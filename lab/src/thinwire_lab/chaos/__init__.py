"""Real processes, and what is done to them on purpose; see `thinwire testbed chaos`."""

from thinwire_lab.chaos.bout import Bout, Report
from thinwire_lab.chaos.deeds import ARENAS

__all__ = ["ARENAS", "Bout", "Report"]
