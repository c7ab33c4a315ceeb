"""How one model takes a step."""

from thinwire.replicas.algorithms import Algorithm, BackPropagation, ContrastiveDivergence
from thinwire.replicas.lightning import TrainingStep
from thinwire.replicas.searches import ConjugateGradient
from thinwire.replicas.torch import TorchReplica, TrainSpec

__all__ = [
    "Algorithm",
    "BackPropagation",
    "ConjugateGradient",
    "ContrastiveDivergence",
    "TorchReplica",
    "TrainSpec",
    "TrainingStep",
]

ALGORITHMS = {kind.name: kind for kind in (BackPropagation, ContrastiveDivergence, TrainingStep)}
