"""Parameters that estimator and model share, with the names that Spark ML uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasInputCols,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from thinwire.errors import ConfigError, nearest

Given = TypeVar("Given", bound=Params)


def accessors(kind: type[Given]) -> type[Given]:
    """Adds a setter and a getter for each parameter to a class of Spark ML, as Spark's own classes have them:
    `setLabelCol(value)`, which returns the object, and `getLabelCol()`. Methods that the class defines itself are
    kept.
    """
    names = [name for name in dir(kind) if isinstance(getattr(kind, name), Param)]
    for name in names:
        for verb, made in (("set", _setter), ("get", _getter)):
            method = f"{verb}{name[0].upper()}{name[1:]}"
            if not hasattr(kind, method):
                function = made(name)
                function.__name__, function.__qualname__ = method, f"{kind.__name__}.{method}"
                function.__doc__ = f"{verb.capitalize()}s the parameter `{name}`."
                setattr(kind, method, function)
    return kind


def _setter(name: str) -> Any:
    def set_one(self: Any, value: Any) -> Any:
        if value is None:
            raise ConfigError(f"{name} = None is not possible; give a value, or clear it: clear({name})")
        return self.setParams(**{name: value})

    return set_one


def _getter(name: str) -> Any:
    def get_one(self: Any) -> Any:
        return self.getOrDefault(name)

    return get_one


DEFAULTS: dict[str, Any] = {"task": "auto", "predictBatchSize": 1024}
"""Default values of the shared parameters."""


def _path(value: Any) -> str:
    return TypeConverters.toString(os.fspath(value) if isinstance(value, os.PathLike) else value)


class SharedParams(HasInputCols, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Parameters that estimator and model share."""

    task: Param[str] = Param(
        Params._dummy(),
        "task",
        "'classification' adds raw predictions and probabilities, 'regression' does not; 'auto' goes by the loss",
        typeConverter=TypeConverters.toString,
    )
    predictBatchSize: Param[int] = Param(  # noqa: N815 - Spark ML's way of writing names
        Params._dummy(),
        "predictBatchSize",
        "rows of one forward pass when predicting",
        typeConverter=TypeConverters.toInt,
    )

    outputBlob: Param[str] = Param(  # noqa: N815
        Params._dummy(),
        "outputBlob",
        "of a Caffe network, the blob that a prediction gives; unset takes the one that its loss compares with labels",
        typeConverter=TypeConverters.toString,
    )

    def _take(self, given: dict[str, Any], others: Iterable[str] = ()) -> None:
        """Sets parameters by name, in Spark's or in Python's spelling; None leaves a parameter unchanged.

        Args:
            given: values by name.
            others: further names that the caller accepts, for the error about an unknown name.
        """
        for name, value in given.items():
            if value is None:
                continue
            known = camel(name)
            if not self.hasParam(known):
                names = sorted({*(snake(p.name) for p in self.params), *others})
                raise ConfigError(f"{type(self).__name__} has no parameter {name!r}. {nearest(name, names)}")
            try:
                self._set(**{known: value})
            except (TypeError, ValueError) as error:  # of Spark's own converters
                raise ConfigError(f"{name} = {value!r} ({type(value).__name__}) is not possible: {error}") from error


class TrainParams(SharedParams, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """Parameters of training. Values may be any Python objects that `thinwire.fit` takes."""

    numWorkers: Param[int] = Param(  # noqa: N815
        Params._dummy(),
        "numWorkers",
        "workers, one task slot each; unset takes the slots that the cluster has",
        typeConverter=TypeConverters.toInt,
    )
    epochs: Param[int] = Param(
        Params._dummy(),
        "epochs",
        "passes over the rows",
        typeConverter=TypeConverters.toInt,
    )
    batchSize: Param[int] = Param(  # noqa: N815
        Params._dummy(),
        "batchSize",
        "rows of one step of one worker",
        typeConverter=TypeConverters.toInt,
    )
    learningRate: Param[float] = Param(  # noqa: N815
        Params._dummy(),
        "learningRate",
        "of an optimizer given by name",
        typeConverter=TypeConverters.toFloat,
    )
    caffe: Param[str] = Param(
        Params._dummy(), "caffe", "the prototxt of a Caffe network, in place of a model", typeConverter=_path
    )
    solver: Param[str] = Param(
        Params._dummy(), "solver", "the prototxt of a Caffe solver, in place of an optimizer", typeConverter=_path
    )
    weights: Param[str] = Param(
        Params._dummy(), "weights", "a caffemodel that a Caffe network begins from", typeConverter=_path
    )
    model: Param[Any] = Param(Params._dummy(), "model", "an nn.Module, a factory of one, or a built-in name")
    loss: Param[Any] = Param(Params._dummy(), "loss", "a name, or a callable of (output, label)")
    optimizer: Param[Any] = Param(Params._dummy(), "optimizer", "a name, or a callable of the parameters")
    strategy: Param[Any] = Param(Params._dummy(), "strategy", "what replicas tell each other: tw.Relay(), a name")
    fitOptions: Param[Any] = Param(  # noqa: N815
        Params._dummy(),
        "fitOptions",
        "further arguments of thinwire.fit, as a dict",
    )


def camel(name: str) -> str:
    """A parameter's name in Spark's spelling.

    >>> camel("label_col"), camel("labelCol"), camel("epochs")
    ('labelCol', 'labelCol', 'epochs')
    """
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def snake(name: str) -> str:
    """A parameter's name in Python's spelling.

    >>> snake("labelCol")
    'label_col'
    """
    return re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name)
