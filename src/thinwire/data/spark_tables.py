"""Statistics of a Spark DataFrame for an encoder, computed by two jobs on the cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Protocol

from thinwire.data.categories import Category, Moments, category_of, refuse_category, refuse_kind
from thinwire.errors import DataError, nearest

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_FLOAT = ("float", "double")


class Columns(Protocol):
    """The columns and limits of an encoder, such as `thinwire.data.tables.TableEncoder`."""

    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def categorical(self) -> Sequence[str]: ...
    @property
    def numeric(self) -> Sequence[str]: ...
    @property
    def min_count(self) -> int: ...
    @property
    def most_categories(self) -> int: ...


def tallies(frame: Any, encoder: Columns) -> tuple[dict[str, Counter[Category]], dict[str, Moments]]:
    """Counts of frequent categories, and moments of numbers."""
    kinds = dict(frame.dtypes)
    for name in encoder.columns:
        if name not in kinds:
            raise DataError(f"column {name!r} is not in the data. {nearest(name, kinds)} Name one of those.")
        role = "categorical" if name in encoder.categorical else "numeric"
        number = kinds[name] in (*_WHOLE, *_FLOAT, "boolean") or kinds[name].startswith("decimal")
        text = kinds[name] == "string" or kinds[name].startswith(("char", "varchar"))
        if not (number or kinds[name] == "void" or (text and role == "categorical")):
            raise refuse_kind(name, kinds[name], role)
    return _counts(frame, encoder, kinds), _moments(frame, encoder)


def _counts(frame: Any, encoder: Columns, kinds: dict[str, str]) -> dict[str, Counter[Category]]:
    """The most frequent categories of all columns, by a single shuffle of (column, value as text)."""
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it
    from pyspark.sql.window import Window

    found: dict[str, Counter[Category]] = {name: Counter() for name in encoder.categorical}
    if not found:
        return found
    names = list(found)
    pairs = [
        F.struct(F.lit(place).alias("place"), F.col(f"`{name}`").cast("string").alias("value"))
        for place, name in enumerate(names)
    ]
    counted = (
        frame.select(F.explode(F.array(*pairs)).alias("pair"))
        .select("pair.place", "pair.value")
        .where(F.col("value").isNotNull())
        .groupBy("place", "value")
        .count()
        .where(F.col("count") >= encoder.min_count)
    )
    frequent = Window.partitionBy("place").orderBy(F.desc("count"), F.asc("value"))
    rows = counted.withColumn("rank", F.row_number().over(frequent)).where(F.col("rank") <= encoder.most_categories)
    for row in rows.select("place", "value", "count").collect():
        name = names[row["place"]]
        value = _parsed(row["value"], kinds[name])
        if value is None:
            continue
        word = category_of(value)
        if word is None:
            raise refuse_category(name, value)
        found[name][word] += row["count"]
    return found


def _parsed(text: str, kind: str) -> Any:
    """A value that Spark has written as text; None for NaN, which counts as null."""
    if kind == "boolean":
        return text == "true"
    if kind in _WHOLE:
        return int(text)
    if kind in _FLOAT:
        value = float(text)
        return None if math.isnan(value) else value
    return Decimal(text) if kind.startswith("decimal") else text


def _moments(frame: Any, encoder: Columns) -> dict[str, Moments]:
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    if not encoder.numeric:
        return {}
    asked = []
    for place, name in enumerate(encoder.numeric):
        value = F.col(f"`{name}`").cast("double")
        finite = F.when(~F.isnan(value) & (F.abs(value) < math.inf), value)
        asked += [F.count(finite).alias(f"n{place}"), F.avg(finite).alias(f"m{place}")]
        asked += [F.var_pop(finite).alias(f"v{place}")]
    row = frame.agg(*asked).first()
    return {
        name: Moments(row[f"n{place}"], row[f"m{place}"], row[f"v{place}"] * row[f"n{place}"])
        if row[f"n{place}"]
        else Moments()
        for place, name in enumerate(encoder.numeric)
    }
