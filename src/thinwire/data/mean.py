"""Mean images, computed from any rows; in Spark's tasks for data in Spark."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.data.sources import open_source
from thinwire.errors import DataError, nearest
from thinwire.records import LOOKED_AT, is_rdd, packing_of, sums, sums_of_records

COLUMNS = ("data", "features", "pixels", "image")
"""Names under which sources have columns of images, in order of preference."""


def mean_image(data: Any, column: str | None = None) -> Tensor:
    """The mean over all rows of a column of arrays, summed in doubles.

    Args:
        data: rows of any kind that `fit` takes. Rows of a DataFrame or an RDD are summed in Spark's tasks.
        column: the column of images; by default "data", "features", "pixels" or "image".

    Raises:
        DataError: There are no rows, or arrays have different shapes.
    """
    count, total = 0, None
    for more, shape, held in _parts(data, column):
        found = np.frombuffer(held, np.float64).reshape(tuple(shape))
        if total is not None and total.shape != found.shape:
            raise DataError(f"the images have shapes {total.shape} and {found.shape}; bring them to one shape")
        count, total = count + more, found if total is None else total + found
    if total is None:
        raise DataError("there are no rows to take the mean of; look at the path or the filter that they come from")
    return torch.from_numpy(total / count).float()


def _parts(data: Any, column: str | None) -> Iterator[tuple[int, Any, bytes]]:
    """Numbers of rows, shapes and sums, one for each part of the data."""
    if is_rdd(data):
        packing = packing_of(data.take(LOOKED_AT))
        chosen = _column(packing.schema.names, column)
        yield from data.mapPartitions(functools.partial(sums_of_records, tuple(packing), chosen)).collect()
        return
    if hasattr(data, "mapInArrow"):
        chosen = _column(data.columns, column)
        kind = "count bigint, shape array<bigint>, total binary"
        for row in data.select(chosen).mapInArrow(functools.partial(sums, chosen), kind).collect():
            yield row["count"], row["shape"], bytes(row["total"])
        return
    source = open_source(data)
    chosen = _column(source.schema.names, column)
    for batch in sums(chosen, source.batches()):
        row = batch.to_pylist()[0]
        yield row["count"], row["shape"], row["total"]


def _column(names: list[str], given: str | None) -> str:
    if given is not None:
        if given not in names:
            raise DataError(f"column {given!r} is not in the data. {nearest(given, names)} Name one of those.")
        return given
    found = next((name for name in COLUMNS if name in names), None)
    if found is None:
        raise DataError(f"the data has columns {', '.join(names)}; say which holds the images: column=…")
    return found
