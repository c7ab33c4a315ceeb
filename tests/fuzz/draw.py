"""Bytes of a fuzzer as choices: which true message to begin with, and what to change in it.

Every input means something, so that a fuzzer does not spend its time on texts that no parser takes; those that look at
bytes as they are have targets of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
WORDS = (
    "",
    "x",
    "train:0",
    "train:1",
    "train:many",
    "buffers:0",
    "float32",
    "int8",
    "int4",
    "joint",
    "0",
    "1",
    "-1",
    "a.b",
    "\ud800",
)
NUMBERS = (0, 1, 2, 3, 5, 7, -1, 255, 256, 4096, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400)
FLOATS = (0.0, 0.5, 1.0, 2.5, -1.0, 1e-40, 1e30, 1e39, 1e308, float("inf"), float("-inf"), float("nan"))


class Draw:
    """Reads choices off the front of some bytes; past their end every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def bytes(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found + bytes(count - len(found))

    def rest(self) -> bytes:
        found = self._data[self._at :]
        self._at = len(self._data)
        return found

    def value(self, depth: int = 2) -> Any:
        """Anything that JSON can say."""
        kind = self.byte() % (11 if depth else 9)
        if kind < 3:
            return self.pick(NUMBERS)
        if kind == 3:
            return self.byte()
        if kind == 4:
            return self.pick((None, True, False))
        if kind == 5:
            return self.pick(FLOATS)
        if kind < 8:
            return self.pick(WORDS)
        if kind == 8:
            return self.bytes(self.byte() % 9).decode("utf-8", "replace")
        if kind == 9:
            return [self.value(depth - 1) for _ in range(self.byte() % 4)]
        return {str(self.pick(WORDS)): self.value(depth - 1) for _ in range(self.byte() % 4)}

    def changed(self, true: Any) -> Any:
        """A copy of something true in which some values are others, are not there, or stand elsewhere."""
        found = _copied(true)
        for _ in range(self.byte() % 4):
            places = list(_places(found))
            holder, key = places[self.byte() % len(places)]
            act = self.byte() % 8
            if act == 0:
                del holder[key]
            elif act == 1:
                other, name = places[self.byte() % len(places)]
                if key in holder if isinstance(holder, dict) else key < len(holder):
                    holder[key] = _copied(other[name])
            elif act == 2 and isinstance(holder, dict):
                holder[str(self.pick(WORDS))] = self.value()
            else:
                holder[key] = self.value()
            if not list(_places(found)):
                break
        return found


def _places(value: Any) -> Any:
    """Every place in nested tables and lists, outermost first."""
    waiting = [value]
    while waiting:
        holder = waiting.pop(0)
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, inner in list(pairs):
            yield holder, key
            if isinstance(inner, (dict, list)):
                waiting.append(inner)


def _copied(value: Any) -> Any:
    """Nested tables and lists anew; whatever else is in them is not changed, and is the same."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def as_sent(value: Any) -> Any:
    """A value as it comes out of JSON on the other side of a wire."""
    return json.loads(json.dumps(value))
