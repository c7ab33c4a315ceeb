"""`TorchModel`: a trained network as a Spark ML model."""

from __future__ import annotations

import copy
import functools
import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from thinwire.cluster.frames import framed
from thinwire.errors import ConfigError
from thinwire.run.session import Result
from thinwire.spark.imports import checked
from thinwire.spark.objects import Source, code_of, damaged, made_of, with_decoder
from thinwire.spark.params import DEFAULTS, SharedParams
from thinwire.spark.predict import Predictor, as_udf
from thinwire.spark.storage import Saved, read_saved, write_saved

OUT = "__thinwire"


class TorchModel(Model, SharedParams, MLWritable, MLReadable["TorchModel"]):
    """Adds predictions to a DataFrame; every other column is kept.

    A classifier adds `rawPrediction`, `probability` (vectors) and `prediction`, as Spark's own do; a regression adds
    `prediction`, a number, or a vector where the network gives several.
    """

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)
        self._skeleton: Callable[[], nn.Module] | None = None
        self._weights: bytes = b""
        self._user: Any = None
        self._token = uuid.uuid4().hex
        self.history: list[dict[str, Any]] = []
        """One row an evaluation."""
        self.summary: dict[str, Any] = {}
        """The run in numbers."""

    @classmethod
    def _of(cls, result: Result, given: Any, transform: Any) -> TorchModel:
        from safetensors.torch import save as as_bytes

        model = cls()
        model._skeleton = skeleton_of(given)
        model._weights = as_bytes({k: v.detach().clone().contiguous() for k, v in result.model.state_dict().items()})
        model._user = transform
        model.history, model.summary = result.history, result.summary
        return model

    @property
    def module(self) -> nn.Module:
        """The network itself, on the CPU, for use without Spark or as the start of another fit."""
        return copy.deepcopy(self._predictor().module()).cpu()

    def history_frame(self, session: Any) -> Any:
        """The history as a DataFrame."""
        if not self.history:
            raise ConfigError("there is no history: the fit had no validation rows")
        names = sorted({name for row in self.history for name in row})
        rows = [tuple(None if row.get(n) is None else float(row[n]) for n in names) for row in self.history]
        return session.createDataFrame(rows, ", ".join(f"`{n}` double" for n in names))

    def setParams(self, **given: Any) -> TorchModel:  # noqa: N802 - Spark ML's way of writing names
        """Sets parameters by name."""
        self._take(given)
        return self

    def copy(self, extra: Any = None) -> TorchModel:
        made: TorchModel = super().copy(extra)
        return made

    def _blob(self) -> Any:
        """Of a Caffe network, the blob that a prediction gives; None of others."""
        name = self.getOrDefault(self.outputBlob) if self.isSet(self.outputBlob) else None
        chosen = getattr(self._skeleton, "blob", None)
        if chosen is not None:
            return chosen(name)
        if name is not None:
            raise ConfigError(f"output_blob = {name!r} is for networks of Caffe, and this is none; leave it out")
        return None

    def _predictor(self) -> Predictor:
        if self._skeleton is None:
            raise ConfigError("this TorchModel is empty; make one with TorchEstimator.fit or TorchModel.load")
        blob, task = self._blob(), self.getOrDefault(self.task)
        return Predictor(
            skeleton=self._skeleton,
            weights=self._weights,
            # The token tells models apart whose weights are equal and whose networks are not.
            digest=hashlib.blake2b(self._weights, digest_size=16).hexdigest() + self._token,
            inputs=tuple(self.getInputCols()),
            task=task if blob is None or blob.classifies or task != "classification" else "regression",
            batch_size=self.getOrDefault(self.predictBatchSize),
            transform=self._user,
            blob=None if blob is None else blob.name,
        )

    def _transform(self, dataset: Any) -> Any:
        from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

        dataset, predictor = framed(dataset), self._predictor()
        classifies = predictor.task == "classification"
        columns = [F.col(f"`{name}`") for name in predictor.inputs]
        fields = ("raw", "probability", "prediction") if classifies else ("prediction",)
        kind = "raw array<double>, probability array<double>, prediction double"
        predicted = as_udf(predictor, fields, kind if classifies else "prediction array<double>")(*columns)
        found = dataset.withColumn(OUT, predicted)
        if not classifies:
            values = F.col(f"{OUT}.prediction")
            return found.withColumn(self.getPredictionCol(), values if self._several() else values[0]).drop(OUT)
        for name, source in ((self.getRawPredictionCol(), "raw"), (self.getProbabilityCol(), "probability")):
            if name:
                found = found.withColumn(name, _vector(F.col(f"{OUT}.{source}")))
        return found.withColumn(self.getPredictionCol(), F.col(f"{OUT}.prediction")).drop(OUT)

    def _several(self) -> bool:
        """Whether a regression gives more than one number a row: its last layer says so, or the blob's size."""
        if (blob := self._blob()) is not None:
            return bool(blob.size > 1)
        last = [v for v in self._predictor().module().state_dict().values() if v.dim()]
        return bool(last) and last[-1].shape[0] > 1

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        return _Reader()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        model: Any = None,
        transform: Callable[..., Any] | None = None,
        modules: Sequence[str] = (),
        allow_pickle: bool = False,
    ) -> TorchModel:
        """Reads a model that `save` wrote.

        Without further arguments the folder may name a network of thinwire, or a class below `nn.Module` that this
        program has imported. Nothing else is imported or called.

        Args:
            path: where it is.
            model: the network or its factory, in place of the stored one.
            transform: the transform that `fit` was given, in place of the stored one.
            modules: packages of yours whose functions and classes the folder may name; they are imported for it.
            allow_pickle: run code that was stored with the model, if it has any. Only for models you trust.
        """
        return _Reader(Source(path, checked(modules), allow_pickle), model, transform).load(path)


def skeleton_of(given: Any) -> Callable[[], nn.Module]:
    """Makes the network anew; of one that was given whole, its form is kept and, where they can be, not its weights."""
    if not isinstance(given, nn.Module):
        made: Callable[[], nn.Module] = given
        return made
    kept = copy.deepcopy(given).cpu()
    unsaved = {name for name, _ in kept.named_buffers()} - set(kept.state_dict())
    names = sum(1 for _ in kept.named_parameters(remove_duplicate=False))
    tied = names > sum(1 for _ in kept.parameters())  # the way to the meta device would untie them
    return functools.partial(copy.deepcopy, kept if unsaved or tied else kept.to("meta"))


def _vector(column: Any) -> Any:
    from pyspark.ml.functions import array_to_vector

    return array_to_vector(column)


class _Writer(MLWriter):
    def __init__(self, model: TorchModel) -> None:
        super().__init__()
        self._model = model

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark ML's way of writing names
        model = self._model
        code = {"skeleton": code_of(model._skeleton), "transform": code_of(model._user)}
        more = {"history": model.history, "summary": model.summary}
        write_saved(path, model, Saved(more, code, model._weights), self)


class _Reader(MLReader["TorchModel"]):
    def __init__(self, source: Source | None = None, model: Any = None, transform: Any = None) -> None:
        super().__init__()
        self._source, self._given, self._transform = source, model, transform

    def load(self, path: str) -> TorchModel:
        model = TorchModel()
        source = self._source or Source(path)
        saved = read_saved(path, model, self)
        lacking = {"skeleton", "transform"} - set(saved.code) or {"history", "summary"} - set(saved.more)
        if lacking:
            raise damaged(path, ValueError(f"it has no {min(lacking)}"))
        network, prepare = saved.code["skeleton"], saved.code["transform"]
        model._skeleton = made_of(network, "model", source) if self._given is None else skeleton_of(self._given)
        model._user = (
            made_of(prepare, "transform", source)
            if self._transform is None
            else with_decoder(prepare, self._transform, source)
        )
        model._weights = saved.weights
        model.history, model.summary = saved.more["history"], saved.more["summary"]
        return model
