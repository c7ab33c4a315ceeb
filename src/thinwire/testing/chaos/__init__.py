"""Real processes, and what is done to them on purpose; see `thinwire testbed chaos`."""

from thinwire.testing.chaos.bout import Bout, Report
from thinwire.testing.chaos.deeds import ARENAS

__all__ = ["ARENAS", "Bout", "Report"]
