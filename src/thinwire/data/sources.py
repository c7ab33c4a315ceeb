"""Any data that a user passes, as a source: a schema, a number of rows, and a stream of batches."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import pyarrow as pa
import torch

from thinwire.data import builtin
from thinwire.data.arrays import named_pair, table_of_arrays
from thinwire.data.columns import is_prepared, prepared, refuse_other_schema
from thinwire.data.deformed import OPEN, Deformed
from thinwire.data.files import FileSource, open_files
from thinwire.errors import DataError, nearest
from thinwire.records import collected, is_rdd

_ALLOWED = (
    "a path, folder or glob of Parquet or Arrow files, a set's name such as 'digits', an Arrow table or list "
    "of record batches, a DataFrame of Spark or pandas, an RDD of (array, label), a dict of arrays, a tuple (X, y) of "
    "arrays or a TensorDataset"
)


class Source(Protocol):
    """Rows to train on. `batches` may be called repeatedly, and gives the same rows in the same order."""

    @property
    def schema(self) -> Any:
        """The Arrow schema of every batch."""

    @property
    def num_rows(self) -> int:
        """Number of rows in all batches."""

    @property
    def transform(self) -> Callable[..., Any] | None:
        """Picklable transform that a loader applies to each batch before training."""

    def batches(self) -> Iterator[Any]:
        """The rows, as Arrow record batches."""


@final
@dataclass(frozen=True)
class TableSource:
    """The rows of an Arrow table in memory."""

    table: Any
    transform: Callable[..., Any] | None = None

    @property
    def schema(self) -> Any:
        return self.table.schema

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def batches(self) -> Iterator[Any]:
        yield from self.table.to_batches()


def open_source(data: object) -> Source:
    """Opens a user's data without reading its rows.

    Raises:
        DataError: The data are of no known kind, or cannot be found or read.
    """
    if all(hasattr(data, name) for name in ("schema", "num_rows", "transform", "batches")):
        return data  # type: ignore[return-value]
    if isinstance(data, (str, os.PathLike)):
        return _named_or_files(os.fspath(data))
    if isinstance(data, list) and data and all(isinstance(item, (str, os.PathLike)) for item in data):
        return open_files([str(os.fspath(item)) for item in data])
    table = collected(data) if is_rdd(data) else _table(data)
    if table is None:
        raise DataError(f"data is a {type(data).__module__}.{type(data).__name__}; {_ALLOWED} is allowed. Convert it.")
    _refuse_twice(table.schema.names)
    return TableSource(table)


def _refuse_twice(names: Sequence[str]) -> None:
    twice = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if twice:
        raise DataError(
            f"column {twice[0]!r} is in the data {list(names).count(twice[0])} times; columns are read by name, and "
            "each needs one of its own. Rename or drop the others."
        )


def select(source: Source, columns: Sequence[str]) -> Source:
    """The same rows with these columns only, in this order. Raises DataError for a column that is missing."""
    for name in columns:
        if name not in source.schema.names:
            raise DataError(
                f"column {name!r} is not in the data. {nearest(name, source.schema.names)} Name one of those."
            )
    if isinstance(source, FileSource):
        return source.select(tuple(dict.fromkeys(columns)))
    return _Selected(source, tuple(dict.fromkeys(columns)))


@final
@dataclass(frozen=True)
class _Selected:
    source: Source
    columns: tuple[str, ...]

    @property
    def schema(self) -> Any:
        return pa.schema([self.source.schema.field(name) for name in self.columns])

    @property
    def num_rows(self) -> int:
        return self.source.num_rows

    @property
    def transform(self) -> Callable[..., Any] | None:
        return self.source.transform

    def batches(self) -> Iterator[Any]:
        for batch in self.source.batches():
            yield batch.select(list(self.columns))


def plain(source: Source) -> Source:
    """The same rows with vectors of Spark ML as lists and decimals as doubles."""
    return source if all(is_prepared(field.type) for field in source.schema) else _Plain(source)


@final
@dataclass(frozen=True)
class _Plain:
    source: Source

    @property
    def schema(self) -> Any:
        return prepared(pa.RecordBatch.from_pylist([], self.source.schema), self.source.schema.names).schema

    @property
    def num_rows(self) -> int:
        return self.source.num_rows

    @property
    def transform(self) -> Callable[..., Any] | None:
        return self.source.transform

    def batches(self) -> Iterator[Any]:
        for batch in self.source.batches():
            yield prepared(batch, self.source.schema.names)


def _named_or_files(text: str) -> Source:
    body, split, rows = _without_options(text)
    if rows is not None:
        return Deformed(body if split is None else f"{body}?split={split}", rows=rows)
    name, colon, folder = body.partition(":")
    if name in builtin.NAMES and (colon or name == "digits" or not os.path.exists(body)):
        return TableSource(*builtin.load_named(name, folder, split or "train"))
    if loaded := builtin.load_folder(body, split or "train"):
        return TableSource(*loaded)
    if split:
        raise DataError(
            f"{text!r} asks for a split; only the sets {', '.join(builtin.NAMES)} have one. "
            "Name the test files by their own path."
        )
    if not _is_path(body):
        raise builtin.unknown_name(name)
    return open_files([body])


def _without_options(text: str) -> tuple[str, str | None, int | None]:
    """Splits 'mnist:DIR?split=test' into 'mnist:DIR' and 'test'; a question mark of a glob is kept."""
    found = re.fullmatch(r"(.*?)\?((?:[a-z]+=\w*)(?:&[a-z]+=\w*)*)", text)
    if found is None:
        return text, None, None
    body, options = found.groups()
    split, rows = None, None
    for option in options.split("&"):
        key, _, value = option.partition("=")
        if key == "split" and value in ("train", "test"):
            split = value
        elif key == "rows" and value.isdigit() and int(value) > 0:
            rows = int(value)
        else:
            wrong = f"an option {key!r}."
            if key == "split":
                wrong = f"{value!r}. {nearest(value, ('train', 'test'))}"
            elif key == "rows":
                wrong = f"{value!r} rows."
            raise DataError(
                f"{text!r} asks for {wrong} Only ?split=train and ?split=test are allowed, and ?rows=1000000 for as "
                "many deformed images. Write one of them."
            )
    return body, split, rows


def _is_path(text: str) -> bool:
    """Whether a text that names no set may be a path: 'minst' and 'minst:/data' may not."""
    if os.path.exists(text) or "://" in text:
        return True
    return any(sign in text.partition(":")[0] for sign in "/\\.*[?~")


def _table(data: object) -> Any:
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        _refuse_twice([str(name) for name in data.columns])
        return pa.Table.from_pandas(data, preserve_index=False).replace_schema_metadata(None)
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, list) and data and all(isinstance(item, pa.RecordBatch) for item in data):
        for index, batch in enumerate(data):
            refuse_other_schema(batch.schema, data[0].schema, f"record batch {index}")
        return pa.Table.from_batches(data)
    if isinstance(data, torch.utils.data.TensorDataset):
        *features, last = data.tensors
        if not features:
            return table_of_arrays({"features": last})
        return table_of_arrays(named_pair(features[0] if len(features) == 1 else features, last))
    if isinstance(data, tuple):
        if len(data) != 2:
            raise DataError(f"data is a tuple of {len(data)}; a pair (X, y) is allowed. Use a dict for more columns.")
        return table_of_arrays(named_pair(*data))
    if isinstance(data, Mapping):
        return table_of_arrays(data)
    return pa.table(data) if hasattr(data, "__arrow_c_stream__") else None


OPEN.append(open_source)
