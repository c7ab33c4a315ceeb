"""Train PyTorch models on the Spark cluster you already have, over the Ethernet you already have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.cluster.local import Local
    from thinwire.cluster.simulated import Fault, Simulated
    from thinwire.cluster.spark import Spark
    from thinwire.coordinator.stopping import EarlyStopping
    from thinwire.data.tables import TableEncoder
    from thinwire.data.tokens import Collate, Tokenize
    from thinwire.exchange.table.delegate import Table
    from thinwire.placement.kinds import Pipeline, Planned, TensorParallel, Whole
    from thinwire.protocol.deadlines import Deadlines
    from thinwire.replicas import Algorithm, BackPropagation, ConjugateGradient, ContrastiveDivergence
    from thinwire.replicas.metrics import MeanOfBatch, MetricOfSums
    from thinwire.replicas.quantiles import QuantileLoss
    from thinwire.run.session import Result, fit
    from thinwire.strategies import (
        EASGD,
        MPCA,
        Auto,
        DeepSpark,
        DiLoCo,
        ParameterTable,
        Relay,
        SparkNet,
        Strategy,
        Synchronous,
        TableHandlers,
    )
    from thinwire.version import __version__

_HOMES = {
    "Deadlines": "thinwire.protocol.deadlines",
    "Algorithm": "thinwire.replicas",
    "Auto": "thinwire.strategies",
    "BackPropagation": "thinwire.replicas",
    "Collate": "thinwire.data.tokens",
    "ConjugateGradient": "thinwire.replicas",
    "ContrastiveDivergence": "thinwire.replicas",
    "DeepSpark": "thinwire.strategies",
    "DiLoCo": "thinwire.strategies",
    "EASGD": "thinwire.strategies",
    "EarlyStopping": "thinwire.coordinator.stopping",
    "Fault": "thinwire.cluster.simulated",
    "Local": "thinwire.cluster.local",
    "MPCA": "thinwire.strategies",
    "MeanOfBatch": "thinwire.replicas.metrics",
    "MetricOfSums": "thinwire.replicas.metrics",
    "ParameterTable": "thinwire.strategies",
    "Pipeline": "thinwire.placement.kinds",
    "Planned": "thinwire.placement.kinds",
    "QuantileLoss": "thinwire.replicas.quantiles",
    "Relay": "thinwire.strategies",
    "Result": "thinwire.run.session",
    "Simulated": "thinwire.cluster.simulated",
    "Spark": "thinwire.cluster.spark",
    "SparkNet": "thinwire.strategies",
    "Strategy": "thinwire.strategies",
    "Synchronous": "thinwire.strategies",
    "Table": "thinwire.exchange.table.delegate",
    "TableEncoder": "thinwire.data.tables",
    "TableHandlers": "thinwire.strategies",
    "Tokenize": "thinwire.data.tokens",
    "TensorParallel": "thinwire.placement.kinds",
    "Whole": "thinwire.placement.kinds",
    "__version__": "thinwire.version",
    "fit": "thinwire.run.session",
}

_PACKAGES = ("caffe",)
"""Reached as attributes, as in `thinwire.caffe.load`."""

__all__ = [
    "Algorithm",
    "Auto",
    "BackPropagation",
    "Collate",
    "ConjugateGradient",
    "ContrastiveDivergence",
    "Deadlines",
    "DeepSpark",
    "DiLoCo",
    "EASGD",
    "EarlyStopping",
    "Fault",
    "Local",
    "MPCA",
    "MeanOfBatch",
    "MetricOfSums",
    "ParameterTable",
    "Pipeline",
    "Planned",
    "QuantileLoss",
    "Relay",
    "Result",
    "Simulated",
    "Spark",
    "SparkNet",
    "Strategy",
    "Synchronous",
    "Table",
    "TableEncoder",
    "TableHandlers",
    "TensorParallel",
    "Tokenize",
    "Whole",
    "__version__",
    "fit",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that importing thinwire costs nothing."""
    if name in _PACKAGES:
        return importlib.import_module(f"thinwire.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
