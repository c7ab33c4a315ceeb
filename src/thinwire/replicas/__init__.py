"""How one model takes a step."""

from thinwire.replicas.algorithms import Algorithm, BackPropagation, ContrastiveDivergence
from thinwire.replicas.searches import ConjugateGradient
from thinwire.replicas.torch import TorchReplica, TrainSpec

__all__ = [
    "Algorithm",
    "BackPropagation",
    "ConjugateGradient",
    "ContrastiveDivergence",
    "TorchReplica",
    "TrainSpec",
]
