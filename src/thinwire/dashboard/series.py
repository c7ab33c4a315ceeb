"""Series of points that stay short: when there are too many, neighbours become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Point = tuple[float | None, ...]
Fold = Literal["mean", "last"]
Mark = tuple[int, int, int]


class Series:
    """Points in the order of time, never more than `most`.

    Of counters that only grow nothing is lost by keeping every other point (`last`); other values are averaged
    (`mean`). Points once told stay as they are until all are folded, which makes a new version: a reader who knows
    version and length needs only what came since.

    >>> short = Series(most=4, fold="mean")
    >>> for t in range(10):
    ...     short.add(float(t), 10.0 * t)
    >>> short.points
    [(1.5, 15.0), (5.5, 55.0)]
    >>> short.version
    2
    """

    def __init__(self, most: int = 720, fold: Fold = "last") -> None:
        self._most, self._fold = most, fold
        self.points: list[Point] = []
        self.version = 0
        self._stride = 1
        self._pending: list[Point] = []

    def add(self, *point: float | None) -> None:
        """Appends a point; it is seen once as many have come as make one by now."""
        self._pending.append(point)
        if len(self._pending) < self._stride:
            return
        self.points.append(self._one(self._pending))
        self._pending = []
        if len(self.points) >= self._most:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [self._one(pair) for pair in pairs]
            self._stride *= 2
            self.version += 1

    def since(self, seen: Mark | None) -> dict[str, object] | None:
        """What a reader does not know yet, who has seen so many points of a version; None where that is nothing."""
        version, count, pending = seen if seen is not None else (-1, 0, 0)
        start = count if version == self.version else 0
        if (version, count, pending) == self.mark:
            return None
        told: dict[str, object] = {"v": self.version, "at": start, "p": [_short(p) for p in self.points[start:]]}
        if self._pending:  # the newest, until enough have come to make a point
            told["last"] = _short(self._pending[-1])
        return told

    @property
    def mark(self) -> Mark:
        """Version, length and what waits to be a point: what a reader who has all of it has seen."""
        return self.version, len(self.points), len(self._pending)

    def _one(self, points: Sequence[Point]) -> Point:
        if self._fold == "last" or len(points) == 1:
            return points[-1]
        return tuple(_mean(column) for column in zip(*points, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _short(point: Point) -> list[float | None]:
    """Time to the millisecond, values to seven digits: more than a picture shows. What is no number is no JSON."""
    when, *values = point
    told = [None if value is None or value - value != 0 else float(f"{value:.7g}") for value in values]
    return [None if when is None else round(when, 3), *told]
