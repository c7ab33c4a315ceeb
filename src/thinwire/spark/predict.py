"""Predictions on executors: takes batches, and returns raw predictions, probabilities and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from torch import nn

from thinwire.cluster.sessions import gpu_given
from thinwire.cluster.shipping import packed
from thinwire.data.columns import (
    RaggedError,
    count_nulls,
    dense,
    form_with_nulls,
    is_tensor,
    may_be_null,
    prepared,
    shown_with_nulls,
    stored_array,
)
from thinwire.data.loader import refuse_unfilled
from thinwire.errors import DataError
from thinwire.models.program import ROWS
from thinwire.replicas.calls import Given, called, scores
from thinwire.replicas.frozen import load_over_base, refuse_other_base
from thinwire.run.definition import nullable_of

_modules: dict[str, nn.Module] = {}
"""Networks that this Python process has built, by their predictors' digests; Spark reuses it for many tasks."""
MOST_MODULES = 4


@dataclass(frozen=True)
class Predictor:
    """A trained network in the form that is sent to executors.

    Attributes:
        skeleton: factory of the network; the weights come from `weights`.
        weights: the weights as safetensors.
        digest: digest of the weights, with a token that tells the network from others with equal weights.
        inputs: columns for the network's inputs.
        reads: columns of the data from which the inputs are made.
        task: "classification" or "regression".
        batch_size: rows of one forward pass.
        transform: the transform of the training, if any.
        base: digest of the frozen parameters, if `weights` lacks them.
        blob: for a Caffe network, the blob that is its output.
    """

    skeleton: Callable[[], nn.Module] = field(repr=False)
    weights: bytes = field(repr=False)
    digest: str
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    task: str
    batch_size: int
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    base: str | None = None
    blob: str | None = None

    def module(self) -> nn.Module:
        """The network, ready to predict; built once for each process."""
        if self.digest not in _modules:
            from safetensors.torch import load

            while len(_modules) >= MOST_MODULES:
                _modules.pop(next(iter(_modules)))
            module = self.skeleton()
            # otherwise copied, so that tied parameters stay tied
            empty = any(value.is_meta for value in module.state_dict().values())
            load_over_base(module, load(self.weights), assign=empty)
            if self.base is not None:
                refuse_other_base(module, self.base, "the network of this model")
            _modules[self.digest] = module.to(_device()).eval()
        return _modules[self.digest]

    def __call__(self, columns: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Raw predictions, probabilities and predictions of some rows; only predictions in a regression."""
        batch = prepared(pa.RecordBatch.from_arrays(list(columns), names=list(self.reads)), self.reads)
        if not batch.num_rows:
            return self._shaped(torch.zeros(0, 1))
        outputs: list[torch.Tensor] = []
        module: Any = self.module()
        with torch.inference_mode():
            for start in range(0, batch.num_rows, self.batch_size):
                given = Given(tuple(self._tensors(batch.slice(start, self.batch_size))), self.inputs)
                outputs.append(self._output(module, given).float().cpu())
        return self._shaped(torch.cat(outputs))

    def _output(self, module: Any, given: Given) -> torch.Tensor:
        """The network's output from which predictions are made, or a blob of a Caffe network."""
        output = called(module, given)
        found: torch.Tensor = scores(output) if self.blob is None else module.net.blobs[self.blob].flatten(1)
        return found

    def examples(self, row: Any, *, whole: bool = False) -> list[torch.Tensor]:
        """Inputs of the network for copies of one row, on the CPU."""
        batch = prepared(pa.Table.from_batches([row] * ROWS).combine_chunks().to_batches()[0], self.reads)
        return [tensor.cpu() for tensor in self.tensors(self._given(batch), whole=whole)]

    def one(self, values: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """The arrays of `__call__` for one row, given as ML vectors, arrays and numbers."""
        given = {name: _one_row(name, value) for name, value in zip(self.reads, values, strict=True)}
        module = self.module()
        with torch.inference_mode():
            tensors = self.tensors(given, whole=getattr(module, "takes_columns", False))
            return self._shaped(self._output(module, Given(tuple(tensors), self.inputs)).float().cpu())

    def _tensors(self, batch: Any) -> list[torch.Tensor]:
        given = self._given(batch)
        unfilled = [name for name in batch.schema.names if count_nulls(batch.column(name))]
        return self.tensors(given, whole=getattr(self.module(), "takes_columns", False), unfilled=unfilled)

    def _given(self, batch: Any) -> dict[str, Any]:
        """A batch's columns; columns that the transform fills keep their nulls."""
        nullable = nullable_of(self.transform)
        pairs = zip(batch.schema.names, batch.columns, strict=True)
        return {name: _column(name, array, nullable=may_be_null(name, nullable)) for name, array in pairs}

    def tensors(
        self, given: dict[str, Any], *, whole: bool = False, unfilled: Sequence[str] = ()
    ) -> list[torch.Tensor]:
        """The network's inputs from columns: doubles become float32, unless a program takes columns unchanged.

        Args:
            given: the columns.
            whole: whether doubles stay doubles.
            unfilled: columns that had nulls, which the transform must have filled.
        """
        if self.transform is not None:
            given = self.transform(given)
        device = _device()
        found = []
        for name in self.inputs:
            value = given[name]
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, np.ndarray) or value.dtype == object:
                    raise DataError(
                        f"column {name!r} is not a tensor; train and predict with a transform that makes it one"
                    )
                value = torch.from_numpy(np.ascontiguousarray(value))
            if name in unfilled:
                refuse_unfilled(name, value)
            found.append((value.float() if value.dtype == torch.float64 and not whole else value).to(device))
        return found

    def _shaped(self, raw: torch.Tensor) -> tuple[np.ndarray[Any, Any], ...]:
        if self.task != "classification":
            return (raw.reshape(len(raw), -1).double().numpy(),)
        if raw.dim() == 1 or raw.shape[1] == 1:  # one logit: two classes
            raw = raw.reshape(-1)
            raw = torch.stack([-raw, raw], dim=1)
            probability = torch.sigmoid(raw)
        else:
            probability = torch.softmax(raw, dim=1)
        return raw.double().numpy(), probability.double().numpy(), raw.argmax(dim=1).double().numpy()


class Shipped:
    """A predictor with the user's own code, for executors that lack the code; unpickled once in each task."""

    def __init__(self, predictor: Predictor) -> None:
        self._payload = packed(predictor)
        self._opened: Predictor | None = None

    def __getstate__(self) -> bytes:
        return self._payload

    def __setstate__(self, payload: bytes) -> None:
        self._payload, self._opened = payload, None

    def __call__(self, columns: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        if self._opened is None:
            self._opened = cloudpickle.loads(self._payload)  # trusted: from the driver, through Spark
        assert self._opened is not None
        return self._opened(columns)


def _one_row(name: str, value: Any) -> Any:
    """A value as a column of one row. Python's numbers and ML vectors become float32, like vectors of a DataFrame."""
    found = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    if found.dtype == object or found.dtype.kind not in "biuf":
        return np.asarray([value], dtype=object)  # an object for a transform, like in `_column`
    if hasattr(value, "toArray"):
        found = found.astype(np.float32)
    return torch.from_numpy(found[None].astype(np.uint8 if found.dtype.kind == "b" else found.dtype))


def _column(name: str, array: Any, *, nullable: bool) -> Any:
    nulls = count_nulls(array)
    if nulls and nullable:
        stored = stored_array(array)
        form = form_with_nulls([stored])
        shown = shown_with_nulls(stored, form)
        return shown if form is None else torch.from_numpy(shown.copy())
    if nulls:
        raise DataError(
            f"column {name!r} has {nulls} nulls; a prediction needs a value in every row. Fill or drop them, "
            "or train with a transform that fills them."
        )
    if not is_tensor(array.type):
        return array.to_numpy(zero_copy_only=False)
    try:
        values = dense(stored_array(array))
    except RaggedError:
        return array.to_numpy(zero_copy_only=False)
    return torch.from_numpy(values.copy())


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = gpu_given()
    return torch.device("cuda" if gpu is None else f"cuda:{min(gpu, torch.cuda.device_count() - 1)}")


def as_struct(found: Sequence[np.ndarray[Any, Any]], names: Sequence[str]) -> Any:
    """Arrays as one Arrow column of structs: matrices become lists of doubles, vectors doubles."""
    columns = []
    for values in found:
        if values.ndim == 1:
            columns.append(pa.array(values, pa.float64()))
            continue
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1), pa.float64())))
    return pa.StructArray.from_arrays(columns, names=list(names))


def as_udf(predictor: Predictor, names: Sequence[str], kind: str) -> Any:
    """A vectorised UDF: over Arrow if this Spark supports it, otherwise over pandas."""
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    single, shipped = len(predictor.reads) == 1, Shipped(predictor)
    if not hasattr(F, "arrow_udf"):
        return _over_pandas(shipped, names, kind, single)

    def predicted(batches: Iterator[Any]) -> Iterator[Any]:
        for given in batches:
            yield as_struct(shipped((given,) if single else given), names)

    def one(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return predicted(batches)

    def many(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return predicted(batches)

    return F.arrow_udf(one if single else many, kind)


def _as_arrow(column: Any) -> Any:
    """A pandas column as an Arrow array; columns of structs, such as vectors and images, come as DataFrames."""
    if not hasattr(column, "columns"):
        return pa.array(column)
    return pa.StructArray.from_arrays([pa.array(column[name]) for name in column], names=list(column))


def _over_pandas(shipped: Shipped, names: Sequence[str], kind: str, single: bool) -> Any:
    import pandas as pd
    from pyspark.sql.functions import pandas_udf  # type: ignore[attr-defined]

    def predicted(batches: Iterator[Any]) -> Iterator[Any]:
        for given in batches:
            found = shipped([_as_arrow(column) for column in ((given,) if single else given)])
            yield pd.DataFrame({name: list(values) for name, values in zip(names, found, strict=True)})

    def one(batches: Iterator[Any]) -> Iterator[Any]:
        return predicted(batches)

    def many(batches: Iterator[Any]) -> Iterator[Any]:
        return predicted(batches)

    # Spark reads these annotations; pandas is imported only here.
    one.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.DataFrame]}
    many.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    return pandas_udf(one if single else many, kind)
