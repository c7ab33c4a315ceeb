"""Columns of a table as a network's inputs: categories as indices, numbers standardised, nulls marked.

An encoder is a transform that consists of plain values, so a model can be saved with it as data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from thinwire.data.categories import WHOLE, Category, Moments, Scale, category_of, refuse_category, refuse_kind
from thinwire.data.columns import count_nulls, is_number, stored_array
from thinwire.data.sources import open_source, plain, select
from thinwire.errors import ConfigError, DataError
from thinwire.values import check_fields, known_only, number, refused, truth, whole

NULL, UNSEEN = 0, 1
"""The indices of a null, and of a category that was absent or too rare when the encoder was fitted."""
FIRST = 2
"""The index of the most frequent category."""
MOST_CATEGORIES = 10_000_000


@final
@dataclass(frozen=True, kw_only=True)
class TableEncoder:
    """A transform that replaces categories by indices and numbers by standardised numbers, under the columns' names.

    A categorical column becomes int64: 0 for a null, 1 for a category that was not seen when the encoder was fitted,
    and 2 onwards for the others, the most frequent first. A numeric column becomes float32 with mean 0 and deviation 1;
    NaN and infinity count as nulls. `fit` and `TorchEstimator` fit an unfitted encoder on the training data.

    Args:
        categorical: columns of text, whole numbers or booleans.
        numeric: columns of numbers.
        min_count: rows that a category needs; rarer categories share the index of unseen ones, which is trained on
        them.
        most_categories: most categories of one column; the most frequent ones are kept.
        fill: value for nulls of numeric columns: a number, or a number by column; by default the column's mean.
        flag_nulls: whether each numeric column becomes two: the number, and 1 where it was null.
        vocabularies: by categorical column, its categories from index 2 on; set by fitting.
        scales: by numeric column, mean and deviation; set by fitting.
    """

    categorical: Sequence[str] = ()
    numeric: Sequence[str] = ()
    min_count: int = 1
    most_categories: int = 100_000
    fill: float | Mapping[str, float] | None = None
    flag_nulls: bool = False
    vocabularies: Mapping[str, Sequence[Category]] | None = None
    scales: Mapping[str, Scale] | None = None

    def __post_init__(self) -> None:
        for key in ("categorical", "numeric"):
            object.__setattr__(self, key, _names(f"TableEncoder.{key}", getattr(self, key)))
        check_fields(
            self,
            "TableEncoder",
            min_count=whole(1),
            most_categories=whole(1, MOST_CATEGORIES),
            flag_nulls=truth,
            fill=self._checked_fill,
        )
        if not self.columns:
            raise ConfigError(
                "TableEncoder has no columns; name some: tw.TableEncoder(categorical=['carrier'], numeric=['distance'])"
            )
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice:
            raise ConfigError(f"TableEncoder has column {twice[0]!r} twice; name it as categorical or as numeric, once")

    def _checked_fill(self, key: str, given: Any) -> Any:
        if isinstance(given, Mapping):
            known_only(key, given, tuple(self.numeric), "TableEncoder's numeric columns")
            return {name: number()(f"{key}.{name}", value) for name, value in given.items()}
        return None if given is None else number()(key, given)

    # -- properties -------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it encodes: the categorical ones, then the numeric ones."""
        return (*self.categorical, *self.numeric)

    @property
    def fitted(self) -> bool:
        """Whether the encoder has been fitted."""
        return self.vocabularies is not None and self.scales is not None

    @property
    def shape(self) -> dict[str, dict[str, int]]:
        """Sizes that a network needs: number of indices of each categorical column, width of each numeric one."""
        words, _ = self._learnt()
        width = 2 if self.flag_nulls else 1
        return {
            "sizes": {name: FIRST + len(words[name]) for name in self.categorical},
            "numbers": dict.fromkeys(self.numeric, width),
        }

    def _learnt(self) -> tuple[Mapping[str, Sequence[Category]], Mapping[str, Scale]]:
        if self.vocabularies is None or self.scales is None:
            raise ConfigError("this TableEncoder is not fitted; use the encoder that encoder.fit(data) returns")
        return self.vocabularies, self.scales

    # -- fitting ----------------------------------------------------------------------------------------------------

    def fit(self, data: Any) -> TableEncoder:
        """This encoder with the categories, means and deviations of the data: any data that `thinwire.fit` takes.

        Raises:
            DataError: A column is missing, or holds values that cannot be encoded.
        """
        if type(data).__module__.startswith("pyspark.sql") and hasattr(data, "groupBy"):
            from thinwire.data.spark_tables import tallies

            counts, moments = tallies(data, self)
        else:
            counts, moments = _tallies(data, self)
        return dataclasses.replace(
            self,
            vocabularies={name: self._chosen(counts[name]) for name in self.categorical},
            scales={name: moments[name].scale for name in self.numeric},
        )

    def _chosen(self, counts: Mapping[Category, int]) -> tuple[Category, ...]:
        """Frequent categories first; ties are sorted by text, so that the order of rows has no effect."""
        often = [word for word, count in counts.items() if count >= self.min_count]
        return tuple(sorted(often, key=lambda word: (-counts[word], str(word)))[: self.most_categories])

    # -- encoding ---------------------------------------------------------------------------------------------------

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        """A batch's columns, with those of the encoder encoded."""
        missing = [name for name in self.columns if name not in columns]
        if missing:
            raise DataError(
                f"column {missing[0]!r} is not in the batch, and the encoder needs it; there are "
                f"{', '.join(map(repr, columns))}. Read it as well (inputs, input_cols), or leave it out of the "
                "encoder."
            )
        encoded: dict[str, Any] = {name: self._indices(name, columns[name]) for name in self.categorical}
        return {**columns, **encoded, **{name: self._standardised(name, columns[name]) for name in self.numeric}}

    @functools.cached_property
    def _lookups(self) -> dict[str, _Lookup]:
        words, _ = self._learnt()
        return {name: _Lookup(name, words[name]) for name in self.categorical}

    def _indices(self, name: str, values: Any) -> torch.Tensor:
        return torch.from_numpy(self._lookups[name](_array(name, values)))

    def _standardised(self, name: str, values: Any) -> torch.Tensor:
        mean, deviation = self._learnt()[1][name]
        given = _array(name, values)
        try:
            found = np.array([math.nan if v is None else v for v in given] if given.dtype == object else given, float)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {name!r} holds a value that is not a number ({_line(error)}), and the encoder has it as "
                "numeric. Name it "
                "as categorical, or convert it."
            ) from error
        lacking = ~np.isfinite(found)
        fill = self.fill.get(name) if isinstance(self.fill, Mapping) else self.fill
        found[lacking] = mean if fill is None else fill
        scaled = torch.from_numpy(((found - mean) / deviation).astype(np.float32))
        return torch.stack([scaled, torch.from_numpy(lacking.astype(np.float32))], 1) if self.flag_nulls else scaled

    # -- serialisation ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The encoder as plain values for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        words, scales = self.vocabularies, self.scales
        return found | {
            "categorical": list(self.categorical),
            "numeric": list(self.numeric),
            "fill": dict(self.fill) if isinstance(self.fill, Mapping) else self.fill,
            "vocabularies": None if words is None else {name: list(found) for name, found in words.items()},
            "scales": None if scales is None else {name: list(found) for name, found in scales.items()},
        }

    @classmethod
    def of_state(cls, state: Any) -> TableEncoder:
        """The encoder that `state` returned as plain values.

        Raises:
            ConfigError: The values do not describe an encoder.
        """
        if not isinstance(state, Mapping):
            raise refused("TableEncoder", state, "what TableEncoder.state() gave")
        known_only("TableEncoder", state, tuple(field.name for field in dataclasses.fields(cls)), "TableEncoder")
        plainly = {k: v for k, v in state.items() if k not in ("vocabularies", "scales")}
        made = cls(**plainly)
        if state.get("vocabularies") is None and state.get("scales") is None:
            return made
        words, scales = _stored(state, "vocabularies", made.categorical), _stored(state, "scales", made.numeric)
        return dataclasses.replace(
            made,
            vocabularies={name: _stored_words(name, found) for name, found in words.items()},
            scales={name: _stored_scale(name, found) for name, found in scales.items()},
        )


# -- categories -------------------------------------------------------------------------------------------------------


@final
class _Lookup:
    """The indices of one column's categories."""

    def __init__(self, column: str, words: Sequence[Category]) -> None:
        self._column = column
        self._index = {word: FIRST + place for place, word in enumerate(words)}
        self._text = bool(words) and isinstance(words[0], str)
        keys = np.array([] if self._text else list(words), np.int64)
        order = np.argsort(keys)
        self._keys, self._places = keys[order], order + FIRST

    def __call__(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if values.dtype.kind in "biuf":
            return self._of_numbers(values)
        found = np.empty(len(values), np.int64)
        for row, value in enumerate(values.tolist()):
            found[row] = self._of(value)
        return found

    def _of(self, value: Any) -> int:
        if value is None or value != value:  # NaN
            return NULL
        word = category_of(value)
        if self._index and word is not None and isinstance(word, str) != self._text:
            raise self._other_kind(value)
        return UNSEEN if word is None else self._index.get(word, UNSEEN)

    def _of_numbers(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        lacking = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
        if self._text and not lacking.all():
            raise self._other_kind(values[~lacking][0].item())
        found = np.where(lacking, NULL, UNSEEN).astype(np.int64)
        fits = ~lacking & (values < WHOLE) & (values >= -WHOLE)
        if values.dtype.kind == "f":
            fits &= np.floor(values) == values
        words = np.where(fits, values, 0).astype(np.int64)
        if len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, words), len(self._keys) - 1)
            known = fits & (self._keys[places] == words)
            found[known] = self._places[places[known]]
        return found

    def _other_kind(self, value: Any) -> DataError:
        was = "text" if self._text else "whole numbers"
        return DataError(
            f"column {self._column!r} holds {reprlib.repr(value)}, and held {was} when the encoder was fitted; the "
            "same kind is needed. Cast the column, or fit the encoder on data of this kind."
        )


# -- statistics of batches --------------------------------------------------------------------------------------------


def _tallies(data: Any, encoder: TableEncoder) -> tuple[dict[str, Counter[Category]], dict[str, Moments]]:
    """Counts of categories, and moments of numbers, in one pass over the data."""
    source = plain(select(open_source(data), encoder.columns))
    counts: dict[str, Counter[Category]] = {name: Counter() for name in encoder.categorical}
    moments = dict.fromkeys(encoder.numeric, Moments())
    for name in encoder.columns:
        _refuse_type(name, source.schema.field(name).type, "categorical" if name in counts else "numeric")
    for batch in source.batches():
        for name in encoder.categorical:
            counts[name].update(_counted(name, stored_array(batch.column(name))))
        for name in encoder.numeric:
            stored = stored_array(batch.column(name)).drop_null()
            moments[name] += Moments.of(stored.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    return counts, moments


def _refuse_type(name: str, kind: Any, role: str) -> None:
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = role == "categorical" and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
    if not (is_number(kind) or text or pa.types.is_null(kind)):
        raise refuse_kind(name, kind, role)


def _counted(name: str, array: Any) -> dict[Category, int]:
    if count_nulls(array) == len(array):
        return {}
    found: dict[Category, int] = {}
    for pair in pc.value_counts(array.drop_null()).to_pylist():
        value = pair["values"]
        if value != value:  # NaN
            continue
        word = category_of(value)
        if word is None:
            raise refuse_category(name, value)
        found[word] = found.get(word, 0) + pair["counts"]
    return found


# -- small checks -----------------------------------------------------------------------------------------------------


def _names(key: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise refused(key, given, 'a list of names of columns, such as ["carrier"]')
    found = tuple(names)
    if not all(isinstance(name, str) and name for name in found):
        raise refused(key, given, 'a list of names of columns, such as ["carrier"]')
    return found


def _array(name: str, values: Any) -> np.ndarray[Any, Any]:
    found = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if found.ndim != 1:
        raise DataError(
            f"column {name!r} holds arrays in the shape {found.shape[1:]}; the encoder takes one value a row. Leave "
            "the column out of the encoder: other inputs reach the model as they are."
        )
    return found


def _stored(state: Mapping[str, Any], key: str, names: Sequence[str]) -> Mapping[str, Any]:
    found = state.get(key)
    if not isinstance(found, Mapping) or set(found) != set(names):
        raise ConfigError(
            f"TableEncoder.{key} = {reprlib.repr(found)} does not have the columns {list(names)}; use what "
            "TableEncoder.state() returned"
        )
    return found


def _stored_words(name: str, given: Any) -> tuple[Category, ...]:
    kinds = {type(word) for word in given} if isinstance(given, list | tuple) else {type(given)}
    fits = kinds <= {str} or (kinds == {int} and all(abs(word) < WHOLE for word in given))
    if not isinstance(given, list | tuple) or not fits or len(set(given)) != len(given):
        raise ConfigError(
            f"TableEncoder.vocabularies.{name} = {reprlib.repr(given)} is not a list of different categories; use what "
            "TableEncoder.state() returned"
        )
    return tuple(given)


def _stored_scale(name: str, given: Any) -> Scale:
    key = f"TableEncoder.scales.{name}"
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(v, numbers.Real) for v in given):
        raise refused(key, given, "a mean and a deviation")
    return float(number()(key, given[0])), float(number(above=0)(key, given[1]))


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
