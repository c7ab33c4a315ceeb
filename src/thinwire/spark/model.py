"""`TorchModel`: a trained network as a Spark ML model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from torch import nn

from thinwire.cluster.frames import framed
from thinwire.data.tokens import Tokenize
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.models.program import Program, Unexportable, exported
from thinwire.replicas.calls import takes_names
from thinwire.replicas.frozen import base_digest, without_base
from thinwire.run.definition import composed
from thinwire.run.session import Result
from thinwire.spark.imports import checked
from thinwire.spark.objects import (
    Code,
    Source,
    WithheldError,
    code_of,
    damaged,
    decoder_and_rest,
    decoder_in,
    made_of,
    with_decoder,
)
from thinwire.spark.params import DEFAULTS, accessors
from thinwire.spark.predict import Predictor, as_udf
from thinwire.spark.single_row import SingleRow
from thinwire.spark.storage import Saved, read_saved, write_saved

OUT = "__thinwire"
WITHOUT = "unexported"
"""The key, in a saved model without a program, under which the reason is stored."""
_log = logging.getLogger("thinwire.spark")


@accessors
class TorchModel(Model, SingleRow, MLWritable, MLReadable["TorchModel"]):
    """Adds predictions to a DataFrame, and keeps its other columns.

    A classifier adds `rawPrediction` and `probability` (vectors) and `prediction`, like Spark's classifiers. A
    regression adds `prediction`: a number, or a vector where the network has several outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)
        self._skeleton: Callable[[], nn.Module] | None = None
        self._weights: bytes = b""
        self._base: str | None = None
        self._user: Any = None
        self._example: Any = None
        self._stored: Saved | None = None
        self._sizes: dict[str, int] | None = None
        self.parent: Any = None
        """The estimator that fitted this model; None for a loaded model."""
        self._token = uuid.uuid4().hex
        self.history: list[dict[str, Any]] = []
        """One row for each evaluation."""
        self.summary: dict[str, Any] = {}
        """The summary of the run."""

    @classmethod
    def _of(cls, result: Result, given: Any, transform: Any, example: Any = None) -> TorchModel:
        from safetensors.torch import save as as_bytes

        model = cls()
        model._skeleton = skeleton_of(given)
        state = result.model.state_dict()
        base = base_digest(result.model)
        if base and base_digest(model._skeleton()) == base:  # the factory rebuilds the frozen base
            model._base, state = base, without_base(result.model)
        model._weights = as_bytes({k: v.detach().clone().contiguous() for k, v in state.items()})
        model._user, model._example = transform, example
        model.history, model.summary = result.history, result.summary
        return model

    @property
    def module(self) -> nn.Module:
        """The network itself, on the CPU, for use without Spark or as the start of another fit.

        For a model that was loaded without its code the network is a `thinwire.models.program.Program`: an `nn.Module`
        with the network's parameters, under their names, that computes the network's output in evaluation mode.
        """
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
        """For a Caffe network, the blob that predictions output; None for other networks."""
        name = self.getOrDefault(self.outputBlob) if self.isSet(self.outputBlob) else None
        chosen = getattr(self._skeleton, "blob", None)
        if chosen is not None:
            return chosen(name)
        if name is not None:
            raise ConfigError(
                f"output_blob = {name!r} is for networks of Caffe, and this is another network; leave it out"
            )
        return None

    def _predictor(self) -> Predictor:
        if self._skeleton is None:
            raise ConfigError("this TorchModel is empty; make one with TorchEstimator.fit or TorchModel.load")
        blob, task = self._blob(), self.getOrDefault(self.task)
        inputs, tokenizer = tuple(self.getInputCols()), _tokenizer_in(self._user)
        labels = {"labels", self.getLabelCol()} & set(inputs)
        # the network computes its own loss from the labels, and predicts without them
        if labels and takes_names(self._skeleton()):
            inputs = tuple(name for name in inputs if name not in labels)
        return Predictor(
            skeleton=self._skeleton,
            weights=self._weights,
            # The token distinguishes models with equal weights and different networks.
            digest=hashlib.blake2b(self._weights, digest_size=16).hexdigest() + self._token,
            inputs=inputs if tokenizer is None else tokenizer.given(inputs),
            reads=inputs if tokenizer is None else tokenizer.reads(inputs),
            task=task if blob is None or blob.classifies or task != "classification" else "regression",
            batch_size=self.getOrDefault(self.predictBatchSize),
            transform=self._user,
            base=self._base,
            blob=None if blob is None else blob.name,
        )

    def _program(self) -> tuple[bytes, str]:
        """The network as a program, or the reason why there is none."""
        if self._stored is not None:
            return self._stored.program, str(self._stored.more.get(WITHOUT, ""))
        if self._base is not None:
            return b"", "the weights that were frozen are made anew by its code, and are not stored"
        if self._example is None or not self._example.num_rows:
            return b"", "there is no row to try it on: none came in time, or the model was loaded with other code"
        predictor, (decoder, rest) = self._predictor(), decoder_and_rest(self._user)
        try:
            if rest is not None:
                try:
                    given = dataclasses.replace(predictor, transform=decoder).examples(self._example, whole=True)
                    return exported(self.module, given, names=predictor.inputs, transform=rest), ""
                except Exception as error:
                    _log.info("the transform is not part of the program: %s", error)
            return exported(self.module, predictor.examples(self._example)), ""
        except Exception as error:  # may come from the user's transform: saving continues without a program
            return b"", str(error) if isinstance(error, (DataError, Unexportable)) else repr(error)[:500]

    def _transform(self, dataset: Any) -> Any:
        from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

        dataset, predictor = framed(dataset), self._predictor()
        classifies = predictor.task == "classification"
        columns = [F.col(f"`{name}`") for name in predictor.reads]
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
        """Whether a regression outputs several numbers for a row: decided by its last layer, or by the blob's size."""
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
        """Reads a model that `save` has written.

        By default the folder may name a network of thinwire, or a subclass of `nn.Module` that this program has
        imported. Nothing else is imported or called. If the network's code is missing or may not be used, the model
        runs the stored program.

        Args:
            path: the folder or URL.
            model: the network or its factory, in place of the stored one.
            transform: the transform of the fit, in place of the stored one.
            modules: packages of yours whose functions and classes the folder may name; they are imported.
            allow_pickle: whether to run stored code; only for models that you trust.
        """
        return _Reader(Source(path, checked(modules), allow_pickle), model, transform).load(path)


def skeleton_of(given: Any) -> Callable[[], nn.Module]:
    """A factory of the network; for a network given as an object, with its structure and, if possible, no weights."""
    if not isinstance(given, nn.Module):
        made: Callable[[], nn.Module] = given
        return made
    kept = copy.deepcopy(given).cpu()
    unsaved = {name for name, _ in kept.named_buffers()} - set(kept.state_dict())
    names = sum(1 for _ in kept.named_parameters(remove_duplicate=False))
    tied = names > sum(1 for _ in kept.parameters())  # moving to the meta device would untie them
    return functools.partial(copy.deepcopy, kept if unsaved or tied else kept.to("meta"))


def _tokenizer_in(transform: Any) -> Tokenize | None:
    """The tokenizer among composed transforms; None where there is none."""
    if isinstance(transform, functools.partial) and transform.func is composed:
        return next((found for part in transform.args if (found := _tokenizer_in(part))), None)
    return transform if isinstance(transform, Tokenize) else None


def _vector(column: Any) -> Any:
    from pyspark.ml.functions import array_to_vector

    return array_to_vector(column)


class _Writer(MLWriter):
    def __init__(self, model: TorchModel) -> None:
        super().__init__()
        self._model = model

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark ML's way of writing names
        model = self._model
        program, why = model._program()
        if why:
            _log.warning("the model is saved without a program, by its code alone: %s", why)
        code = {"skeleton": code_of(model._skeleton), "transform": code_of(model._user)}
        if model._stored is not None:
            code = model._stored.code
        more = {"history": model.history, "summary": model.summary, "sizes": model._known_sizes(), "base": model._base}
        more |= {WITHOUT: why} if why else {}
        write_saved(path, model, Saved(more, code, model._weights, program), self)


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
        try:
            model._skeleton, model._user = self._by_code(saved, source)
        except WithheldError as error:
            if self._given is not None:
                raise
            model._skeleton, model._user = self._by_program(saved, source, error)
        if self._given is None and self._transform is None:
            model._stored = saved
        model._weights, model._sizes = saved.weights, _sizes_in(saved.more)
        model.history, model.summary = saved.more["history"], saved.more["summary"]
        model._base = saved.more.get("base")
        return model

    def _by_code(self, saved: Saved, source: Source) -> tuple[Any, Any]:
        """The network's factory and the transform, from stored code or from the caller."""
        network = saved.code["skeleton"]
        skeleton = made_of(network, "model", source) if self._given is None else skeleton_of(self._given)
        return skeleton, self._prepare(saved.code["transform"], source)

    def _by_program(self, saved: Saved, source: Source, error: WithheldError) -> tuple[Any, Any]:
        """The network's factory and the transform from the stored program, because the stored code may not be used."""
        if not saved.program:
            why = saved.more.get(WITHOUT)
            told = f" The model was saved without a program that could stand in: {why}" if isinstance(why, str) else ""
            raise WithheldError(f"{error}.{told}" if told else str(error)) from error
        program = Program.read(saved.program)
        program.check_weights(safetensors_of(saved.weights))
        prepare = saved.code["transform"]
        if not program.takes_columns:
            return functools.partial(Program.read, saved.program), self._prepare(prepare, source)
        if self._transform is not None:
            raise ConfigError(
                f"transform = {self._transform!r} cannot stand in for the stored one, which is a part of the program "
                f"that {source.path!r} holds. Leave it out, or give the network too: model=make_net, transform=prepare"
            )
        return functools.partial(Program.read, saved.program), decoder_in(prepare, source)

    def _prepare(self, code: Code, source: Source) -> Any:
        if self._transform is None:
            return made_of(code, "transform", source)
        return with_decoder(code, self._transform, source)


def _sizes_in(more: dict[str, Any]) -> dict[str, int]:
    held = more.get("sizes")
    known = held if isinstance(held, dict) else {}
    return {name: known[name] for name in ("features", "outputs") if type(known.get(name)) is int}


def safetensors_of(weights: bytes) -> dict[str, Any]:
    """Decodes tensors by name.

    Raises:
        CheckpointError: The data are not safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(weights)
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of the model are not safetensors ({error}). Copy its folder again from its source."
        ) from error
