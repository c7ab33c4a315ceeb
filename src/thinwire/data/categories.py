"""Statistics of a table's columns: categories, and moments of numbers."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.errors import DataError

Category = str | int
Scale = tuple[float, float]
WHOLE = 2.0**63
"""Whole numbers are smaller than this in magnitude."""


def category_of(value: Any) -> Category | None:
    """A value as a category: a text or a whole number (booleans and whole floats included); None for other values.

    >>> category_of("a"), category_of(True), category_of(3.0), category_of(0.5)
    ('a', 1, 3, None)
    """
    if isinstance(value, str):
        return value
    try:
        found = int(value)
        return found if found == value and abs(found) < WHOLE else None
    except (OverflowError, TypeError, ValueError):
        return None


def refuse_category(column: str, value: Any) -> DataError:
    """The error for a value that cannot be a category."""
    return DataError(
        f"column {column!r} holds {reprlib.repr(value)} ({type(value).__name__}), which cannot be a category; text, "
        "whole "
        "numbers below 2**63 and booleans are. Name the column as numeric, or cast it to text."
    )


def refuse_kind(column: str, kind: Any, role: str) -> DataError:
    """The error for a column whose type does not fit its role in the encoder."""
    allowed = "text, whole numbers and booleans" if role == "categorical" else "numbers and booleans"
    return DataError(
        f"column {column!r} holds {kind}, and the encoder has it as {role}; {allowed} can be. Cast it, make such "
        "columns of it (day of the week, hour), or leave it out of the encoder."
    )


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers; moments of parts are combined exactly (Chan et al.)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of numbers together.

        >>> Moments(2, 1.0, 2.0) + Moments(2, 3.0, 2.0)
        Moments(count=4, mean=2.0, squares=8.0)
        """
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        return Moments(count, mean, self.squares + other.squares + apart**2 * self.count * other.count / count)

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Moments:
        """The moments of an array; values that are not finite are left out."""
        values = values[np.isfinite(values)]
        return cls(len(values), float(values.mean()), float(values.var() * len(values))) if len(values) else cls()

    @property
    def scale(self) -> Scale:
        """Mean and standard deviation; 0 and 1 without numbers, and deviation 1 where all numbers are the same."""
        deviation = math.sqrt(self.squares / self.count) if self.count else 0.0
        usable = math.isfinite(deviation) and deviation > abs(self.mean) * 1e-12
        return _rounded(self.mean), _rounded(deviation) if usable else 1.0


def _rounded(value: float) -> float:
    """Rounds to 12 digits, because the order of rows changes later digits."""
    return float(f"{value:.12g}")
