"""thinwire for Spark ML: an Estimator that trains a network on a DataFrame, and a Model that predicts with it."""

from thinwire.spark.estimator import TorchEstimator
from thinwire.spark.imports import trust_modules
from thinwire.spark.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel", "trust_modules"]
