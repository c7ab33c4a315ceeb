"""A long run in which a worker dies again and again: the speed it keeps, and what its processes come to hold."""

from thinwire_lab.soak.judge import Soaked, judge
from thinwire_lab.soak.order import Order, run

__all__ = ["Order", "Soaked", "judge", "run"]
