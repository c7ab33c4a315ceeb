"""`TorchEstimator`: trains on a DataFrame, like other estimators of Spark ML."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from thinwire.cluster.frames import example_row, framed, image_decoder
from thinwire.cluster.sessions import slots
from thinwire.cluster.spark import Spark
from thinwire.errors import ConfigError
from thinwire.models import model_by_name
from thinwire.records import is_rdd
from thinwire.replicas.labels import labels_of
from thinwire.replicas.objectives import OWN, NamedOptimizer
from thinwire.run.arguments import checked
from thinwire.run.definition import in_turn
from thinwire.run.session import fit
from thinwire.run.tables import OfTable, of_table
from thinwire.spark.imports import checked as checked_modules
from thinwire.spark.model import TorchModel
from thinwire.spark.objects import Source, Withheld, WithheldError, code_of, damaged, made_of
from thinwire.spark.params import DEFAULTS, TrainParams, accessors, camel
from thinwire.spark.slot_queue import queue_of
from thinwire.spark.storage import Saved, has_saved, read_saved, slot_of, write_saved

if TYPE_CHECKING:
    from thinwire.spark.caffe import CaffeFit


@accessors
class TorchEstimator(Estimator, TrainParams, MLWritable, MLReadable["TorchEstimator"]):  # type: ignore[type-arg]
    """Trains a PyTorch network on a Spark cluster.

    Every parameter is a Spark ML `Param`. It may be given here in Spark's or in Python's spelling, set later, or put in
    a grid for `CrossValidator`.

    Args:
        model: an `nn.Module`, a factory of one, or the name of a built-in network.
        input_cols: columns for the network's inputs, in order: numbers, arrays, ML vectors, images. By default the
        columns
            of a `TableEncoder`, if `transform` is one; with an RDD, all but label, weight and indicator.
        label_col: the column that the loss compares with.
        weight_col: a column of row weights.
        validation_indicator_col: a boolean column that is true for validation rows.
        strategy: how replicas exchange; by default `Relay`.
        num_workers: number of workers; each takes one task slot.
        epochs: passes over the rows.
        batch_size: rows of one step of one worker.
        learning_rate: of an optimizer given by name.
        optimizer: a name, or a callable that makes an optimizer from the parameters.
        loss: a name, or a callable of (output, label).
        caffe: the prototxt of a Caffe network, in place of `model`.
        solver: the prototxt of a Caffe solver, in place of `optimizer`; it may name the network.
        weights: a caffemodel with initial weights of a Caffe network.
        output_blob: for a Caffe network, the blob that `transform` outputs.
        options: further arguments of `thinwire.fit` (`scheduler`, `transform`, `stop`, `out`, `callbacks`, …) and
            further parameters (`prediction_col`, `task`, …).
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str | None = None,
        *,
        input_cols: Sequence[str] | None = None,
        label_col: str | None = None,
        weight_col: str | None = None,
        validation_indicator_col: str | None = None,
        strategy: Any = None,
        num_workers: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        optimizer: Any = None,
        loss: Any = None,
        caffe: Any = None,
        solver: Any = None,
        weights: Any = None,
        output_blob: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS, epochs=1, batchSize=64, learningRate=0.01, seed=0)
        self._setDefault(loss="cross_entropy", optimizer="sgd", strategy="relay", fitOptions={})
        self.setParams(
            model=model,
            input_cols=list(input_cols) if isinstance(input_cols, Sequence) else input_cols,
            label_col=label_col,
            weight_col=weight_col,
            validation_indicator_col=validation_indicator_col,
            strategy=strategy,
            num_workers=num_workers,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            optimizer=optimizer,
            loss=loss,
            caffe=caffe,
            solver=solver,
            weights=weights,
            output_blob=output_blob,
            **options,
        )

    def setParams(self, **given: Any) -> TorchEstimator:  # noqa: N802 - Spark ML's way of writing names
        """Sets parameters by name; names that are not parameters are passed to `thinwire.fit`."""
        passed = {k: v for k, v in given.items() if k in OPTIONS and not self.hasParam(k)}
        self._take({k: v for k, v in given.items() if k not in passed}, OPTIONS)
        for name in given.keys() - passed.keys():
            argument, param = ARGUMENT_OF.get(camel(name)), self.getParam(camel(name))
            if argument is not None and self.isSet(param):
                self._set(**{param.name: _kept(name, self.getOrDefault(param), argument)})
        if passed:
            kept = {name: _kept(name, value, name) for name, value in passed.items()}
            self._set(fitOptions={**self.getOrDefault(self.fitOptions), **kept})
        return self

    def _optimizer(self) -> Any:
        """The optimizer or its factory; one given by name gets the learning rate, unless its settings have one."""
        given, rate = self.getOrDefault(self.optimizer), self.getOrDefault(self.learningRate)
        if isinstance(given, str):
            return NamedOptimizer(given, lr=rate)
        if not self.isSet(self.learningRate):
            return given
        if not isinstance(given, Mapping):
            warnings.warn("learning_rate has no effect: the optimizer is a function, which sets its own", stacklevel=4)
        elif "lr" not in given:
            return {**given, "lr": rate}
        elif given["lr"] != rate:
            raise ConfigError(f"learning_rate = {rate} and optimizer = {dict(given)} differ; leave one of them out")
        return given

    def _fit(self, dataset: Any) -> TorchModel:
        value, by_caffe = self.getOrDefault, self._is_by_caffe()
        records, dataset = is_rdd(dataset), framed(dataset)
        inputs: Sequence[str] | None = self._of_records(dataset) if records else None
        if self.isSet(self.inputCols):
            inputs = value(self.inputCols)
        options = self._options()
        cluster = options.pop("cluster", None) or Spark(
            workers=value(self.numWorkers) if self.isSet(self.numWorkers) else None, session=dataset.sparkSession
        )
        given: Any = None
        if by_caffe:
            asked = self._by_caffe(dataset, inputs, options)
            inputs, given = asked.inputs, asked.found.model
            settings = options | asked.arguments
            transform = checked({"transform": options.get("transform")})["transform"]
        else:
            given, transform, inputs = self._by_model(dataset, inputs, options)
            assert inputs is not None
            settings = options | {
                "inputs": inputs,
                "label": value(self.labelCol),
                "weight": value(self.weightCol) if self.isSet(self.weightCol) else None,
                "loss": value(self.loss),
                "batch_size": value(self.batchSize),
                "epochs": value(self.epochs) if self.isSet(self.epochs) or "seconds" not in options else None,
                "transform": transform,
            }
        settings = {"optimizer": self._optimizer()} | settings if "optimizer" not in settings else settings
        with _slots_for(cluster, dataset.sparkSession):
            result = fit(
                given, dataset, strategy=value(self.strategy), seed=int(value(self.seed)), cluster=cluster, **settings
            )
            example = example_row(dataset, list(inputs))
        made = TorchModel._of(
            result,
            given.without_weights() if by_caffe else model_by_name(given) if isinstance(given, str) else given,
            in_turn(image_decoder(dataset), transform),
            example,
        )
        self._copyValues(made)
        made._set(inputCols=list(inputs))
        if value(self.task) == "auto":
            task = _task_of(value(self.loss), result.model)
            if by_caffe:
                task = "classification" if made._blob().classifies else "regression"
            made._set(task=task)
        made.parent = self
        return made

    def _is_by_caffe(self) -> bool:
        """Whether prototxts define the network or the solver."""
        by_caffe = self.isSet(self.caffe) or self.isSet(self.solver)
        if by_caffe == self.isSet(self.model):
            raise ConfigError(
                "TorchEstimator needs a model; write TorchEstimator(model=make_net, input_cols=[…]), or "
                'TorchEstimator(caffe="train_val.prototxt", solver="solver.prototxt")'
                if not by_caffe
                else "TorchEstimator has a model and a network of Caffe; leave one of them out"
            )
        return by_caffe

    def _options(self) -> dict[str, Any]:
        """Arguments of `fit` without a parameter of their own; raises where an object was withheld on load."""
        options = dict(self.getOrDefault(self.fitOptions))
        params = (self.getParam(name) for name in sorted(OBJECTS))
        given = [self.getOrDefault(param) for param in params if self.isDefined(param)]
        for held in (*given, *options.values()):
            if isinstance(held, Withheld):
                raise WithheldError(held.why)
        if self.isSet(self.validationIndicatorCol):
            options["validation"] = self.getOrDefault(self.validationIndicatorCol)
        return options

    def _by_model(self, dataset: Any, inputs: Sequence[str] | None, options: dict[str, Any]) -> OfTable:
        """The network, its transform and its inputs; a `TableEncoder` is fitted."""
        value, held = self.getOrDefault, options.get("validation")
        besides = {
            "label_col": value(self.labelCol),
            "weight_col": value(self.weightCol) if self.isSet(self.weightCol) else None,
            "validation_indicator_col": held if isinstance(held, str) else None,
        }
        found = of_table(
            value(self.model),
            options.pop("transform", None),
            dataset,
            inputs=inputs,
            besides=besides,
            validation=held,
        )
        if found.inputs is None:
            raise ConfigError(f"TorchEstimator needs input_cols; the data has {', '.join(dataset.columns)}")
        return found

    def _by_caffe(self, dataset: Any, inputs: Sequence[str] | None, options: dict[str, Any]) -> CaffeFit:
        """The arguments of a fit from prototxts, with those that the user has set."""
        from thinwire.spark.caffe import caffe_fit  # imported here: it needs protobuf

        said = {"weight_col": self.weightCol, "loss": self.loss}
        if self.isSet(self.solver):
            said |= {"optimizer": self.optimizer, "learning_rate": self.learningRate}
        for name, param in said.items():
            if self.isSet(param):
                raise ConfigError(f"{name} has no meaning for a network of Caffe, whose prototxts say it; leave it out")
        if self.isSet(self.solver) and options.get("scheduler") is not None:
            raise ConfigError("solver has its own learning rates; leave scheduler out")
        files = {
            p.name: self.getOrDefault(p) if self.isSet(p) else None for p in (self.caffe, self.solver, self.weights)
        }
        named = {"batch_size": self.batchSize, "epochs": self.epochs}
        own = {name: self.getOrDefault(param) for name, param in named.items() if self.isSet(param)}
        found = caffe_fit(files, dataset, inputs, self.getOrDefault(self.labelCol), options | own)
        return found._replace(arguments={k: v for k, v in own.items() if k == "epochs"} | found.arguments)

    def _of_records(self, dataset: Any) -> list[str]:
        """The default inputs of an RDD's records: all columns but label, weight and indicator."""
        others = (self.labelCol, self.weightCol, self.validationIndicatorCol)
        taken = {self.getOrDefault(param) for param in others if self.isDefined(param)}
        return [name for name in dataset.columns if name not in taken]

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        return _Reader()

    @classmethod
    def load(
        cls, path: str, *, modules: Sequence[str] = (), allow_pickle: bool = False, **given: Any
    ) -> TorchEstimator:
        """Reads an estimator that `save` has written.

        Args:
            path: the folder or URL.
            modules: packages of yours whose functions and classes the folder may name; they are imported.
            allow_pickle: whether to run stored code; only for folders that you trust.
            given: objects that replace the stored ones: `model`, `loss`, `optimizer`, `strategy`, and arguments of
            `fit` such
                as `transform`.
        """
        return _Reader(Source(path, checked_modules(modules), allow_pickle), given).load(path)


def _slots_for(cluster: Any, session: Any) -> Any:
    """Waits for slots that other fits of this process hold, such as those of a CrossValidator."""
    there = slots(session) if isinstance(cluster, Spark) else None
    if there is None:
        return contextlib.nullcontext()
    return queue_of(session.sparkContext.applicationId).slots(cluster.workers, there)


class _Writer(MLWriter):
    def __init__(self, estimator: TorchEstimator) -> None:
        super().__init__()
        self._estimator = estimator

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark ML's way of writing names
        estimator = self._estimator
        held = {p.name: v for p, v in estimator._paramMap.items() if p.name in OBJECTS}
        options = held.pop("fitOptions", {})
        code = {name: code_of(value) for name, value in held.items()}
        code |= {f"fitOptions.{name}": code_of(value) for name, value in options.items()}
        write_saved(path, estimator, Saved({}, code), self, leave_out=OBJECTS)


class _Reader(MLReader[Any]):
    def __init__(self, source: Source | None = None, given: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._source, self._given = source, given or {}

    def load(self, path: str) -> TorchEstimator:
        estimator = TorchEstimator()
        source = self._source or Source(path)
        saved = read_saved(path, estimator, self, leave_out=OBJECTS)
        for name, code in saved.code.items():
            option = name.removeprefix("fitOptions.")
            if option not in (OBJECTS - {"fitOptions"} if option == name else OPTIONS):
                raise damaged(path, ValueError(f"there is no {name!r}"))
            if option in self._given:
                continue
            try:
                estimator.setParams(**{option: made_of(code, slot_of(name), source)})
            except WithheldError as error:
                if not self._is_of_a_tuned_model(path):
                    raise
                _withhold(estimator, option, Withheld(code, str(error)))
        return estimator.setParams(**self._given)

    def _is_of_a_tuned_model(self, path: str) -> bool:
        """Whether a path is in the folder of a CrossValidatorModel or TrainValidationSplitModel. Spark loads their
        estimator together with the best model, which predicts without it.
        """
        parts = path.rstrip("/").split("/")
        if "estimator" not in parts:
            return False
        root = "/".join(parts[: len(parts) - 1 - parts[::-1].index("estimator")])
        return has_saved(f"{root}/bestModel", self)


def _withhold(estimator: TorchEstimator, option: str, value: Withheld) -> None:
    if option in OPTIONS:
        estimator._set(fitOptions={**estimator.getOrDefault(estimator.fitOptions), option: value})
    else:
        estimator._set(**{option: value})


TAKEN = {"model", "data", "inputs", "label", "weight", "seed", "epochs", "batch_size", "optimizer", "strategy", "loss"}
"""Arguments of `fit` with a parameter of their own."""
OPTIONS = set(inspect.signature(fit).parameters) - TAKEN
"""Arguments of `fit` without a parameter of their own."""
ARGUMENT_OF = {
    "inputCols": "inputs",
    "labelCol": "label",
    "weightCol": "weight",
    "numWorkers": "epochs",
    "batchSize": "batch_size",
    **{name: name for name in ("model", "loss", "optimizer", "strategy", "epochs", "seed")},
}
"""For each parameter, an argument of `fit` that has the same check."""
OBJECTS = {"model", "loss", "optimizer", "strategy", "fitOptions"}
"""Parameters that may hold any Python object."""


def _task_of(loss: Any, module: nn.Module) -> str:
    """The task of predictions, from the loss; for a network with its own loss, from its number of classes."""
    scored = labels_of(loss).scores or (loss == OWN and getattr(getattr(module, "config", None), "num_labels", 1) > 1)
    return "classification" if scored else "regression"


def _kept(name: str, value: Any, argument: str) -> Any:
    """A value in the form in which it was given, after its check; losses and transforms in the checked form."""
    found = checked({argument: value}, {argument: name})[argument]
    return found if isinstance(value, str | Mapping) and argument in ("loss", "transform") else value
