"""The whole protocol in virtual time, with faults drawn from a seed; see `thinwire testbed schedules`."""

from thinwire_lab.schedules.draw import Schedule
from thinwire_lab.schedules.play import Verdict, play

__all__ = ["Schedule", "Verdict", "play"]
