"""Checkpoints on their way: parts that workers have written, until each checkpoint is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from thinwire.engine.outcome import order_of
from thinwire.engine.ports import Header


class Whole(NamedTuple):
    """A checkpoint all of whose parts are written."""

    name: str
    step: int
    parts: list[dict[str, Any]]


class Saves:
    """Reports of parts, by checkpoint."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._reports: dict[str, dict[int, Header]] = {}
        self._done: set[str] = set()

    def hear(self, worker: int, header: Header) -> None:
        """A worker has written its parts."""
        self._reports.setdefault(str(header["name"]), {})[worker] = header

    def whole(self, needed: set[int], newest: str | None) -> Iterator[Whole]:
        """Checkpoints that are whole now; one older than the newest is none any more: that one's commit cleared it."""
        for name in sorted(set(self._reports) - self._done, key=order_of):
            reports = self._reports[name]
            parts = {p["name"]: p for r in reports.values() for p in r["parts"]}
            joint = [part for part in parts if str(part).startswith("joint")]
            if order_of(name) <= order_of(newest or "") or not needed <= set(reports) or len(joint) < self._group_size:
                continue
            self._done.add(name)
            newest = name
            yield Whole(name, max(int(r["steps"]) for r in reports.values()), [*parts.values()])
