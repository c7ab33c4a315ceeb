"""Parquet and Arrow files, local or on any file system that fsspec knows, read one record batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import fsspec
import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet as pq

from thinwire.data.columns import UNREADABLE, reason, refuse_other_schema
from thinwire.errors import DataError

_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 65536


@final
@dataclass(frozen=True)
class FileSource:
    """The rows of some files in order. Made by `open_files`, which has read the schema of every file."""

    filesystem: Any
    paths: tuple[str, ...]
    schema: Any
    num_rows: int
    transform: Callable[..., Any] | None = None

    def batches(self) -> Iterator[Any]:
        """Record batches of about 8 MiB."""
        names = list(self.schema.names)
        for path in self.paths:
            with _opened(self.filesystem, path) as file:
                for batch in _read(file, names):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)

    def select(self, columns: Sequence[str]) -> FileSource:
        """The same rows with these columns only; other columns are not read."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))


def open_files(patterns: Sequence[str]) -> FileSource:
    """Opens the files that paths, folders and globs stand for; the files of each are sorted by name.

    Raises:
        DataError: No file was found, a file cannot be read, or its columns differ from the first file's.
    """
    found = [_matches(pattern) for pattern in patterns]
    filesystem, paths = found[0][0], [path for _, matched in found for path in matched]
    for pattern, (other, _) in zip(patterns, found, strict=True):
        if other != filesystem:
            raise DataError(
                f"{pattern!r} is on another file system than {patterns[0]!r}; one for all files is allowed. "
                "Copy them to one place."
            )
    schema, num_rows = None, 0
    for path in paths:
        with _opened(filesystem, path) as file:
            found_schema, rows = _measure(file)
        if schema is None:
            schema = found_schema
        refuse_other_schema(found_schema, schema, f"file {path!r}")
        num_rows += rows
    return FileSource(filesystem, tuple(paths), schema, num_rows)


def _matches(pattern: str) -> tuple[Any, list[str]]:
    try:
        filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{pattern!r} cannot be opened ({error}); paths and URLs that fsspec knows can. "
            "Check the prefix, or install the package that serves it."
        ) from error
    if any(sign in path for sign in "*?["):
        found = [p for p in filesystem.glob(path) if not _hidden(p, os.path.dirname(p)) and filesystem.isfile(p)]
    elif filesystem.isdir(path):
        found = [p for p in filesystem.find(path) if p.endswith(_PARQUET + _ARROW) and not _hidden(p, path)]
        if layered := [p for p in found if "=" in p[len(path) :].rpartition("/")[0]]:
            raise DataError(
                f"{layered[0]!r} is in a partitioned folder, whose columns are partly in folder names; "
                "folders without such names are allowed. Pass the table of "
                "pyarrow.dataset.dataset(path, partitioning='hive'), or use Spark."
            )
    else:
        found = [path] if filesystem.exists(path) else []
    if not found:
        raise DataError(
            f"no file matches {pattern!r}; a path, folder or glob of {', '.join(_PARQUET + _ARROW)} files is "
            "allowed. Check the spelling, and that this machine can see it."
        )
    if strange := [p for p in found if not p.endswith(_PARQUET + _ARROW)]:
        raise DataError(
            f"{strange[0]!r} is not of a known kind; allowed are files that end in {', '.join(_PARQUET + _ARROW)}. "
            "Convert it to Parquet, or narrow the path to such files."
        )
    return filesystem, sorted(found)


def _hidden(path: str, folder: str) -> bool:
    """Whether a file is a hidden one of Spark or an editor, such as _SUCCESS."""
    return any(part.startswith(("_", ".")) for part in path[len(folder) :].split("/") if part)


@contextmanager
def _opened(filesystem: Any, path: str) -> Iterator[Any]:
    """A reader of the file, closed at the end; errors of reading are raised with the file's name."""
    local = isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)
    try:
        with pa.memory_map(path, "r") if local else filesystem.open(path, "rb") as file:
            if path.endswith(_ARROW):
                yield pa.ipc.open_file(file)
            else:
                yield pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{path!r} cannot be read ({reason(error)}); a whole Parquet or Arrow file is needed. Write it again."
        ) from error


def _measure(file: Any) -> tuple[Any, int]:
    if isinstance(file, pq.ParquetFile):
        schema, rows = file.schema_arrow.remove_metadata(), file.metadata.num_rows
    else:
        schema = file.schema.remove_metadata()
        rows = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
    refuse_other_schema(schema, schema, "")  # raises for names that are not text
    return schema, rows


def _read(file: Any, columns: list[str]) -> Iterator[Any]:
    if not isinstance(file, pq.ParquetFile):
        for index in range(file.num_record_batches):
            batch = file.get_batch(index).select(columns)
            batch.validate(full=True)  # refuses offsets that point outside the data
            yield batch
        return
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    row_bytes = sum(group.total_byte_size for group in groups) // max(file.metadata.num_rows, 1)
    rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(row_bytes, 1)))
    for batch in file.iter_batches(batch_size=rows, columns=columns):
        yield batch.select(columns)
