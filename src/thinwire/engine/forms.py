"""What workers may tell the coordinator, field by field: a message of another form is refused before it is heeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thinwire.engine.ports import Header

MOST = 1 << 53
"""Counts past this are no longer exact in JSON."""
MOST_NAME = 100
MOST_PIECES = 1 << 20
"""Of a result, and of each of its pieces."""

Fits = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _real(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MOST)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_NAME


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _list(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _values(fits: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _form(needed: Mapping[str, Fits], **optional: Fits) -> Fits:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and fit(value[name]) for name, fit in needed.items())
            and all(fit(value[name]) for name, fit in optional.items() if name in value)
        )

    return fits


def _one_of(first: Fits, second: Fits) -> Fits:
    return lambda value: first(value) or second(value)


def _position(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_count, value))


_SPENT = dict.fromkeys(("stepped_s", "waited_s", "exchanged_s"), _real)
_PROGRESS = _form(
    {"steps": _count, "rows": _count, "position": _position, "busy": _real, "gap_s": _real},
    loss=_maybe(_real),
    **_SPENT,
)
_NONE = _form({})
FORMS: dict[str, Fits] = {
    "join": _form({"address": _text}, host=_text, pid=_count, rows=_count, meets=_maybe(_text)),
    "fetch": _form({"name": _name, "i": _count}),
    "beat": _form(
        {"landed": _count, "bytes": _count},
        progress=_one_of(lambda value: value == {}, _PROGRESS),
        waiting=_maybe(_values(_list(_count))),
        received=_count,
        refused=_count,
    ),
    "prepared": _form(
        {"g": _count, "landed": _count, "since": _count, "fresh": _truth, "digest": _text}, more=_maybe(_table)
    ),
    "evaluated": _form(
        dict.fromkeys(("p", "rows", "steps", "done"), _count) | {"sums": _values(_real), "weights": _values(_real)}
    ),
    "caught": _form({"published": _count}),
    "saved": _form({"name": _name, "steps": _count, "parts": _list(_form({"name": _name}))}),
    "finished": _NONE,
    "epoch": _form({"epoch": _count, "rows": _count}, loss=_maybe(_real)),
    "event": _form({"kind": _text, "fields": _table}),
    "failed": _form({"error": _text, "traceback": _text}),
    "result": _form(dict.fromkeys(("part", "chunk", "chunks", "i", "n"), _count)),
    "apart": _form({"n": _count}),
    "bye": _NONE,
}


def fits(header: Header) -> bool:
    """Whether a message is of a kind that workers send, and has what that kind has.

    >>> fits({"t": "caught", "a": 0, "published": 3}), fits({"t": "caught", "a": 0, "published": "all"})
    (True, False)
    >>> fits({"t": "gift", "a": 0})
    False
    """
    form = FORMS.get(header["t"])
    if form is None or not _count(header.get("a")) or not form(header):
        return False
    if header["t"] != "result":
        return True
    return bool(header["i"] < header["n"] <= MOST_PIECES and header["chunk"] < header["chunks"] <= MOST_PIECES)
