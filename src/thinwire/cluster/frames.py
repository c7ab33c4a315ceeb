"""Spark DataFrames as data: their columns, and the deal of their rows into one partition for each worker."""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from thinwire.cluster.base import Dealt, Transform
from thinwire.cluster.sessions import cancel, is_remote, job_runner
from thinwire.data.feeds import Streamed, Wanted
from thinwire.errors import ConfigError, DataError, nearest
from thinwire.records import LOOKED_AT, is_rdd, packing_of, packs, unpacked

INDICATOR = "__thinwire_validation"
IMAGE_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")
ROW_S = 60.0
_log = logging.getLogger("thinwire.spark")


def is_frame(data: Any) -> bool:
    """Whether data is a Spark DataFrame, without importing pyspark."""
    kind = type(data)
    return kind.__name__ == "DataFrame" and kind.__module__.startswith("pyspark.sql")


def framed(data: Any) -> Any:
    """An RDD as a DataFrame whose rows are computed when they are read; other data unchanged.

    A record (array, label) has the columns "features" and "label"; a Row or a dict has the columns that it names.
    """
    if not is_rdd(data):
        return data
    from pyspark.sql import SparkSession
    from pyspark.sql.pandas.types import from_arrow_schema

    packing = packing_of(data.take(LOOKED_AT))
    session = SparkSession.builder.getOrCreate()
    packed = data.mapPartitions(functools.partial(packs, tuple(packing)))
    frame = session.createDataFrame(packed, "pack binary", verifySchema=False)
    return frame.mapInArrow(functools.partial(unpacked, tuple(packing)), from_arrow_schema(packing.schema))


class FrameData:
    """A DataFrame as data; see `thinwire.cluster.base.Opened`."""

    def __init__(self, frame: Any, validation: Any, workers: int, repartition: bool | str) -> None:
        self._frame, self._workers, self._repartition = frame, workers, repartition
        self.names: list[str] = list(frame.columns)
        self.indicator = validation if isinstance(validation, str) else None
        self._held = validation if is_frame(validation) else None
        if self.indicator is not None and self.indicator not in self.names:
            raise DataError(f"validation column {self.indicator!r} is not there. {nearest(self.indicator, self.names)}")
        if not (validation is None or self.indicator or is_frame(validation) or isinstance(validation, float | int)):
            raise ConfigError(
                f"validation is a {type(validation).__name__}; with a DataFrame it is a share of the rows, another "
                "DataFrame, or the name of a column that is true for validation rows"
            )
        self.transform = image_decoder(frame)

    def deal(self, wanted: Wanted, folder: str) -> Dealt:
        frame, chosen = self._frame, wanted.columns
        if chosen is not None:
            for name in chosen:
                if name not in self.names:
                    raise DataError(f"column {name!r} is not in the data. {nearest(name, self.names)}")
            keep = [*dict.fromkeys(chosen), *([wanted.indicator] if wanted.indicator else [])]
            frame = frame.select(*[_quoted(name) for name in keep])
        if self._held is not None:
            frame, wanted = _joined(frame, self._held, wanted)
        frame, kept = self._dealt(frame)
        schema = arrow_schema(frame)
        wanted = wanted.measured(first_row(training_rows(frame, wanted.indicator), schema))
        return Dealt(Streamed(schema, wanted), wanted.labels, frame=(frame, kept))

    def _dealt(self, frame: Any) -> tuple[Any, bool]:
        """A frame with one partition for each worker, and whether the frame was persisted for this run."""
        two = self._held is not None  # merging partitions of two frames would give some workers rows of one kind only
        if two and self._repartition is False:
            raise ConfigError(
                "repartition=False keeps a DataFrame's partitions, and here are two, one of validation rows; "
                "leave it out, or give validation as a share, or as a column that is true for validation rows"
            )
        pieces = None if two or self._repartition is True else _pieces_straight_from_files(frame)
        if self._repartition is False and pieces is not None and pieces < self._workers:
            raise ConfigError(
                f"the DataFrame has {pieces} partitions and {self._workers} workers are asked for, so that some would "
                f"never start; leave out repartition=False, or ask for {pieces} workers"
            )
        if self._repartition is False or (pieces is not None and pieces >= self._workers):
            return (frame if pieces == self._workers else frame.coalesce(self._workers)), False
        frame = frame.repartition(self._workers)
        # A shuffle right before the workers' stage would restart all of them when one executor is lost, so its result
        # is kept twice.
        from pyspark import StorageLevel

        return frame.persist(StorageLevel.DISK_ONLY_2), True

    def rows_dealt(self) -> list[int]:
        """Rows that each worker would get, counted over the dealt frame."""
        from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

        frame, kept = self._dealt(self._frame)
        counted = frame.groupBy(F.spark_partition_id().alias("worker")).count().collect()
        if kept:
            frame.unpersist()
        found = {row["worker"]: row["count"] for row in counted}
        return [found.get(worker, 0) for worker in range(self._workers)]


def image_decoder(frame: Any) -> Transform | None:
    """A transform that makes tensors of a frame's image columns; None where there are none."""
    images = tuple(f.name for f in frame.schema.fields if _is_image(f.dataType))
    return functools.partial(decode_images, images) if images else None


def training_rows(frame: Any, indicator: str | None) -> Any:
    """The rows to train on, with rows whose indicator is null: the workers report those."""
    if indicator is None or dict(frame.dtypes).get(indicator) != "boolean":
        return frame
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    held = F.col(_quoted(indicator))
    return frame.filter(held.isNull() | ~held)


def first_row(frame: Any, schema: Any) -> Any | None:
    """The frame's first row as a record batch, empty if there is none; None if none comes in time."""
    found: list[Any] = []

    def take() -> None:
        # the job was cancelled, or the rows cannot be computed: the workers will report that
        with contextlib.suppress(Exception):
            found.append(frame.take(1))

    tag = f"thinwire-row-{uuid.uuid4().hex[:8]}"
    job = job_runner(frame.sparkSession, tag, "thinwire: one row", take)
    job.start()
    job.join(ROW_S)
    if job.is_alive():
        cancel(frame.sparkSession, tag)
        _log.info("no row came within %.0f s to find the number of the model's outputs", ROW_S)
    if not found:
        return None
    rows = [{f.name: _plain(row[f.name], f.dataType) for f in frame.schema.fields} for row in found[0]]
    return pa.RecordBatch.from_pylist(rows, schema)


def example_row(frame: Any, names: Sequence[str]) -> Any | None:
    """Some columns of the frame's first row; None if none comes in time."""
    chosen = frame.select(*[_quoted(name) for name in names])
    return first_row(chosen, arrow_schema(chosen))


def _plain(value: Any, kind: Any) -> Any:
    """A value in the form that Arrow takes: ML vectors and rows as dicts."""
    if value is not None and hasattr(kind, "sqlType"):
        return dict(zip(kind.sqlType().names, kind.serialize(value), strict=True))
    return value.asDict(recursive=True) if hasattr(value, "asDict") else value


def arrow_schema(frame: Any) -> Any:
    """The Arrow schema of a frame's batches."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(frame.schema)


def decode_images(names: Sequence[str], columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of Spark's image schema as float32 tensors of channels × height × width, colours in RGB, from 0 to 1."""
    for name in names:
        if name in columns:
            columns = columns | {name: _stacked(name, columns[name])}
    return columns


def _stacked(name: str, images: Any) -> Any:
    decoded = [_decoded(image) for image in images]
    shapes = {image.shape for image in decoded}
    if len(shapes) > 1:
        shown = ", ".join("×".join(map(str, s)) for s in sorted(shapes)[:3])
        raise DataError(
            f"column {name!r} has images of different sizes ({shown}); a batch needs one size. Give a transform that "
            "resizes them."
        )
    return np.stack(decoded)


def _decoded(image: dict[str, Any]) -> np.ndarray[Any, Any]:
    try:
        height, width, channels = int(image["height"]), int(image["width"]), int(image["nChannels"])
        if min(height, width, channels) < 1:
            raise ValueError(f"{height} × {width} of {channels} channels")
        pixels = np.frombuffer(image["data"], np.uint8).reshape(height, width, channels)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"an image cannot be decoded ({error}); Spark's image schema is needed, with a byte for each pixel and "
            "channel. Drop rows that could not be read (dropInvalid), or give a transform."
        ) from error
    if channels >= 3:  # stored as blue, green, red
        pixels = np.concatenate([pixels[..., 2::-1], pixels[..., 3:]], axis=-1)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32) / 255.0


def _is_image(kind: Any) -> bool:
    return tuple(getattr(kind, "names", ())) == IMAGE_FIELDS


def _joined(frame: Any, held: Any, wanted: Wanted) -> tuple[Any, Wanted]:
    """Training and validation rows in one frame, with a column that tells them apart."""
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    missing = [name for name in frame.columns if name not in held.columns]
    if missing:
        raise DataError(f"the validation DataFrame lacks {', '.join(map(repr, missing))}. Give it the same columns.")
    both = frame.withColumn(INDICATOR, F.lit(False)).unionByName(
        held.select(*[_quoted(n) for n in frame.columns]).withColumn(INDICATOR, F.lit(True))
    )
    return both, wanted._replace(indicator=INDICATOR)


def _pieces_straight_from_files(frame: Any) -> int | None:
    """Partitions of a frame that needs no shuffle, so that a lost one can be read again; None if it needs one."""
    if is_remote(frame.sparkSession):
        return None
    with contextlib.suppress(Exception):  # Spark's plan is internal: where it cannot be read, rows are dealt out
        plan = frame._jdf.queryExecution().executedPlan().toString()
        if not any(word in plan for word in ("Exchange", "Shuffle", "ObjectHashAggregate")):
            return int(frame._jdf.rdd().getNumPartitions())
    return None


def _quoted(name: str) -> str:
    return f"`{name}`"
