"""The whole protocol in virtual time, under what a seed makes go wrong; see `thinwire testbed schedules`."""

from thinwire_lab.schedules.draw import Schedule
from thinwire_lab.schedules.play import Verdict, play

__all__ = ["Schedule", "Verdict", "play"]
