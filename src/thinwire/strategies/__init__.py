"""What replicas tell each other, and what they do with the answer: one file a strategy."""

from thinwire.strategies.base import Joint, Measured, Nothing, Progress, Setting, Share, Strategy
from thinwire.strategies.diloco import DiLoCo
from thinwire.strategies.mpca import MPCA
from thinwire.strategies.registry import STRATEGIES, name_of, strategy
from thinwire.strategies.relay import Relay
from thinwire.strategies.sparknet import SparkNet
from thinwire.strategies.synchronous import Synchronous

__all__ = [
    "MPCA",
    "STRATEGIES",
    "DiLoCo",
    "Joint",
    "Measured",
    "Nothing",
    "Progress",
    "Relay",
    "Setting",
    "Share",
    "SparkNet",
    "Strategy",
    "Synchronous",
    "name_of",
    "strategy",
]
