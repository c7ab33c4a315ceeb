"""The whole protocol in virtual time, under what a seed makes go wrong; see `thinwire testbed schedules`."""

from thinwire.testing.schedules.draw import Schedule
from thinwire.testing.schedules.play import Verdict, play

__all__ = ["Schedule", "Verdict", "play"]
