"""Prediction on executors: batches in, raw predictions, probabilities and predictions out."""

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
from thinwire.data.columns import RaggedError, count_nulls, dense, is_tensor, prepared, stored_array
from thinwire.errors import DataError

_modules: dict[str, nn.Module] = {}
"""Networks that this Python process has built, by their predictors' digests: Spark uses it for many tasks."""
MOST_MODULES = 4


@dataclass(frozen=True)
class Predictor:
    """A trained network as it travels to executors.

    Attributes:
        skeleton: makes the network; its weights come from `weights`.
        weights: as safetensors.
        digest: of the weights, with what tells the network from others of equal weights.
        inputs: columns given to the network.
        task: "classification" or "regression".
        batch_size: rows of one forward pass.
        transform: what the training had, if anything.
        blob: of a Caffe network, the blob that stands for its output.
    """

    skeleton: Callable[[], nn.Module] = field(repr=False)
    weights: bytes = field(repr=False)
    digest: str
    inputs: tuple[str, ...]
    task: str
    batch_size: int
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    blob: str | None = None

    def module(self) -> nn.Module:
        """The network, ready to predict; built once a process."""
        if self.digest not in _modules:
            from safetensors.torch import load

            while len(_modules) >= MOST_MODULES:
                _modules.pop(next(iter(_modules)))
            module = self.skeleton()
            empty = any(p.is_meta for p in module.parameters())  # others are copied into: tied ones stay tied
            module.load_state_dict(load(self.weights), assign=empty)
            _modules[self.digest] = module.to(_device()).eval()
        return _modules[self.digest]

    def __call__(self, columns: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Raw predictions, probabilities and predictions of some rows; predictions only in a regression."""
        batch = prepared(pa.RecordBatch.from_arrays(list(columns), names=list(self.inputs)), self.inputs)
        if not batch.num_rows:
            return self._shaped(torch.zeros(0, 1))
        outputs: list[torch.Tensor] = []
        module: Any = self.module()
        with torch.inference_mode():
            for start in range(0, batch.num_rows, self.batch_size):
                output = module(*self._tensors(batch.slice(start, self.batch_size)))
                output = output if self.blob is None else module.net.blobs[self.blob].flatten(1)
                outputs.append(output.float().cpu())
        return self._shaped(torch.cat(outputs))

    def _tensors(self, batch: Any) -> list[torch.Tensor]:
        given = {name: _column(name, array) for name, array in zip(batch.schema.names, batch.columns, strict=True)}
        if self.transform is not None:
            given = self.transform(given)
        device = _device()
        found = []
        for name in self.inputs:
            value = given[name]
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, np.ndarray) or value.dtype == object:
                    raise DataError(
                        f"column {name!r} is no tensor; train and predict with a transform that makes it one"
                    )
                value = torch.from_numpy(np.ascontiguousarray(value))
            found.append((value.float() if value.dtype == torch.float64 else value).to(device))
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
    """A predictor with the user's own code in it, on its way to executors that lack it; opened once in each task."""

    def __init__(self, predictor: Predictor) -> None:
        self._payload = packed(predictor)
        self._opened: Predictor | None = None

    def __getstate__(self) -> bytes:
        return self._payload

    def __setstate__(self, payload: bytes) -> None:
        self._payload, self._opened = payload, None

    def __call__(self, columns: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        if self._opened is None:
            self._opened = cloudpickle.loads(self._payload)  # from the driver, through Spark
        assert self._opened is not None
        return self._opened(columns)


def _column(name: str, array: Any) -> Any:
    if nulls := count_nulls(array):
        raise DataError(
            f"column {name!r} has {nulls} nulls; a prediction needs a value in every row. Fill or drop them."
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
    """Arrays as one Arrow column of structs: matrices as lists of doubles, vectors as doubles."""
    columns = []
    for values in found:
        if values.ndim == 1:
            columns.append(pa.array(values, pa.float64()))
            continue
        offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1), pa.float64())))
    return pa.StructArray.from_arrays(columns, names=list(names))


def as_udf(predictor: Predictor, names: Sequence[str], kind: str) -> Any:
    """A vectorised UDF: over Arrow where this Spark has those, or else over pandas."""
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    single, shipped = len(predictor.inputs) == 1, Shipped(predictor)
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
    """A pandas column; one of structs, as vectors and images are, comes as a DataFrame."""
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

    # Spark reads these; pandas itself is only imported here.
    one.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.DataFrame]}
    many.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    return pandas_udf(one if single else many, kind)
