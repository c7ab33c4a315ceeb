"""How one model takes a step."""

from thinwire.replicas.torch import TorchReplica, TrainSpec

__all__ = ["TorchReplica", "TrainSpec"]
