"""Soak test: a long run whose workers are killed repeatedly; measures its speed and the resources of its processes."""

from thinwire_lab.soak.judge import Soaked, judge
from thinwire_lab.soak.order import Order, run

__all__ = ["Order", "Soaked", "judge", "run"]
