"""What replicas tell each other, and what they do with the answer: one file a strategy."""

from thinwire.strategies.auto import Auto
from thinwire.strategies.base import Joint, Measured, Nothing, Progress, Setting, Share, Strategy
from thinwire.strategies.deepspark import DeepSpark
from thinwire.strategies.diloco import DiLoCo
from thinwire.strategies.easgd import EASGD
from thinwire.strategies.handlers import Eventual, Strict, TableHandlers, TableTuple
from thinwire.strategies.joint_optimizer import JointOptimizer, Taken
from thinwire.strategies.mpca import MPCA
from thinwire.strategies.parameter_table import ParameterTable
from thinwire.strategies.registry import STRATEGIES, name_of, strategy
from thinwire.strategies.relay import Relay
from thinwire.strategies.served import Served
from thinwire.strategies.sparknet import SparkNet
from thinwire.strategies.synchronous import Synchronous

__all__ = [
    "EASGD",
    "MPCA",
    "STRATEGIES",
    "Auto",
    "DeepSpark",
    "DiLoCo",
    "Eventual",
    "Joint",
    "JointOptimizer",
    "Measured",
    "Nothing",
    "ParameterTable",
    "Progress",
    "Relay",
    "Served",
    "Setting",
    "Share",
    "SparkNet",
    "Strategy",
    "Strict",
    "Synchronous",
    "TableHandlers",
    "TableTuple",
    "Taken",
    "name_of",
    "strategy",
]
