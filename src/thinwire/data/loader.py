"""Batches of tensors from a shard: columns are selected, transformed, cast, moved to the device, and prefetched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch

from thinwire.data.prefetch import Ahead
from thinwire.data.sampling import Position, Sampler
from thinwire.data.shards import Shard
from thinwire.errors import ConfigError, DataError, nearest
from thinwire.replicas.labels import ANY, Labels

Transform = Callable[[dict[str, Any]], dict[str, Any]]


class Batch(NamedTuple):
    """The input of one training step. `position` is that of this batch, and `names` are those of the inputs."""

    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    num_rows: int
    position: Position
    names: tuple[str, ...] = ()


@final
class Loader:
    """Reads a shard's batches in a sampler's order.

    Args:
        shard: The worker's rows.
        sampler: The rows of each batch.
        inputs: Columns that the model is called with, in order.
        label: Column that the loss compares with.
        labels: The labels that the loss takes. Labels that a transform makes are checked batch by batch; others were
            checked when rows were dealt out.
        weight: Column of per-row weights.
        transform: Takes and returns the columns of one batch as a dict of tensors and numpy arrays, with the same
        number
            of rows. It gets all columns of the shard, with nulls as NaN in columns of numbers and as None in others. It
        must
            not return nulls.
        device: Device of the tensors.
        prefetch: Batches that a thread prepares ahead. None means 2 with a transform or a device other than the CPU,
        and
            0 otherwise, where a thread would cost more time than it saves.

    Raises:
        DataError: A column is missing, or is not a tensor and no transform makes it one.
    """

    def __init__(
        self,
        shard: Shard,
        sampler: Sampler,
        *,
        inputs: Sequence[str],
        label: str | None,
        labels: Labels = ANY,
        weight: str | None = None,
        transform: Transform | None = None,
        device: torch.device | str = "cpu",
        prefetch: int | None = None,
    ) -> None:
        if isinstance(inputs, str) or not inputs:
            raise ConfigError(f"inputs is {inputs!r}; it must be a list of column names. Write inputs=['pixels'].")
        if prefetch is not None and prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}; it must be 0 or more. Give 0 to gather without a thread.")
        if sampler.num_rows != shard.num_rows:
            raise ConfigError(
                f"the sampler is for {sampler.num_rows} rows and the shard has {shard.num_rows}; they must "
                "agree. Make the sampler with the shard's num_rows."
            )
        self._shard, self._sampler, self._transform = shard, sampler, transform
        self._inputs, self._label, self._weight, self._labels = tuple(inputs), label, weight, labels
        self._needed = tuple(dict.fromkeys(n for n in (*inputs, label, weight) if n is not None))
        self._device = torch.device(device)
        busy = transform is not None or self._device.type != "cpu"
        self._put = self._moved if busy else None
        self._prefetch = (2 if busy else 0) if prefetch is None else prefetch
        self._threads: weakref.WeakSet[Ahead[Batch]] = weakref.WeakSet()
        self._closed = False
        self._with_nulls = shard.with_nulls
        if transform is None:
            for name in self._needed:
                if why := shard.why_no_tensor(name):
                    raise DataError(
                        f"{why}; an input, label or weight must be numbers of one shape. "
                        "Give a transform that makes a tensor of it."
                    )

    def batches(self, start: Position, epochs: int | None) -> Iterator[Batch]:
        """Batches from `start` to the end of epoch `epochs` - 1; endless where `epochs` is None."""
        if not self._prefetch:
            yield from self._gathered(start, epochs)
            return
        ahead = Ahead(self._gathered(start, epochs), self._prefetch)
        self._threads.add(ahead)
        try:
            yield from ahead
        finally:
            ahead.close()

    def close(self) -> None:
        """Ends all iterations and their threads; after that there are no batches."""
        self._closed = True
        for ahead in list(self._threads):
            ahead.close()

    def _gathered(self, position: Position, epochs: int | None) -> Iterator[Batch]:
        if not self._sampler.batches_per_epoch:
            return
        while not self._closed and (epochs is None or position.epoch < epochs):
            yield self._gather(position)
            position = self._sampler.next(position)

    def _gather(self, position: Position) -> Batch:
        rows = self._sampler.rows(position)
        if self._transform is None:
            columns: dict[str, Any] = self._shard.take(rows, self._needed)
        else:
            columns = self._transformed(self._transform, self._shard.take(rows), len(rows))
            if self._label is not None:
                self._labels.refuse_wrong(f"column {self._label!r} after the transform", columns[self._label])
        label = None if self._label is None else self._labels.tensor(columns[self._label])
        weight = None if self._weight is None else _as_weight(columns[self._weight])
        inputs = tuple([_narrowed(columns[name]) for name in self._inputs])
        if self._put is not None:
            inputs = tuple(map(self._put, inputs))
            label = None if label is None else self._put(label)
            weight = None if weight is None else self._put(weight)
        return Batch(inputs, label, weight, len(rows), position, self._inputs)

    def _transformed(self, transform: Transform, given: dict[str, Any], num_rows: int) -> dict[str, torch.Tensor]:
        columns = transform(given)
        if not isinstance(columns, dict):
            raise DataError(
                f"the transform returned {type(columns).__name__}; it must return a dict of columns. "
                "End it with `return columns`."
            )
        out = {}
        for name in self._needed:
            if name not in columns:
                raise DataError(
                    f"column {name!r} is missing after the transform. {nearest(name, map(str, columns))} "
                    "Let the transform return it, or name one of those."
                )
            out[name] = _as_tensor(name, columns[name])
            length = len(out[name]) if out[name].dim() else 0
            if length != num_rows:
                raise DataError(
                    f"column {name!r} has {length} rows after the transform where the batch has {num_rows}; "
                    "a transform must return one row for each row of the batch. Filter or repeat rows before training."
                )
            if name in self._with_nulls:
                refuse_unfilled(name, out[name])
        return out

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def refuse_unfilled(name: str, values: torch.Tensor) -> None:
    """Raises a DataError where a column that had nulls still has NaN after the transform."""
    count = int(values.isnan().sum()) if values.is_floating_point() else 0
    if count:
        raise DataError(
            f"column {name!r} has nulls in its data, and {count} NaN{'s' if count > 1 else ''} after the transform, of "
            f"{len(values)} rows; a value is needed in every row. Let the transform fill them (torch.nan_to_num), or "
            "use tw.TableEncoder."
        )


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError) as error:
        kind = f"a numpy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(
            f"column {name!r} is {kind} after the transform; it must be a tensor or an array of numbers. "
            "Let the transform turn it into one."
        ) from error


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.float32:
        return tensor
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _as_weight(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.float()
