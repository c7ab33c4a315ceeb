"""What workers may say to the coordinator, field by field. What does not fit is refused at the door: a worker that says
something strange must not end everybody's run.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from thinwire import events
from thinwire.engine.ports import Header
from thinwire.rules.compression import CODECS
from thinwire.strategies import Setting

Check = Callable[[Any], bool]
_MOST = 2**63
MOST_PIECES = 1 << 20
"""Of a result, and of each of its pieces."""
_SAVE = re.compile(r"[0-9]{1,18}-(final|step-[0-9]{1,18})")
_TOLD = (
    events.RoundLanded,
    events.SettingChanged,
    events.Tried,
    events.HandedOver,
    events.Rejoined,
    events.CheckpointFailed,
    events.NonFinite,
)
TOLD = {kind.kind: kind for kind in _TOLD}
"""Events that workers tell of."""


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _any_table(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _table(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _pair(value: Any) -> bool:
    return _list(_count)(value) and len(value) == 2


def _form(needed: Mapping[str, Check], **more: Check) -> Check:
    """A table that has these fields, and may have those."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or not all(name in value and fits(value[name]) for name, fits in needed.items()):
            return False
        return all(fits(value[name]) for name, fits in more.items() if name in value)

    return check


def _or_empty(check: Check) -> Check:
    return lambda value: value is None or value == {} or check(value)


def _checkpoint(value: Any) -> bool:
    return _text(value) and bool(_SAVE.fullmatch(value))


def _within(header: Header, number: str, count: str) -> bool:
    return bool(header[number] < header[count] <= MOST_PIECES)


def _shard(value: Any) -> bool:
    return value in ("train", "validation")


def _servers(value: Any) -> bool:
    """Checkpoints by server, whose number is a key of JSON."""
    return _table(_list(_pair))(value) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)


_PROGRESS = _form(
    {"steps": _count, "rows": _count, "position": _pair, "busy": _number, "gap_s": _number},
    loss=_maybe(_number),
    first_loss=_maybe(_number),
    stepped_s=_number,
    waited_s=_number,
    exchanged_s=_number,
    evaluated_s=_number,
    score=_count,
    note=_any_table,
)
_MORE = _form(
    {"since": _count, "line": _count, "live": _list(_count), "due": _list(_count), "still": _list(_count)},
    kept=_servers,
    went=_pair,
)
_RESULT = _form({"part": _count, "chunk": _count, "chunks": _count, "i": _count, "n": _count})
_A_PART = _form({"name": _text, "size_bytes": _count, "digest": _text})


def _hint(hint: Any) -> Check:
    """The check of a field of an event, from its annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [_hint(option) for option in get_args(hint)]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        return _list(_hint(get_args(hint)[0]))
    checks: dict[Any, Check] = {int: _count, float: _number, str: _text, bool: _truth, type(None): lambda v: v is None}
    return checks.get(hint, _any_table)


def _event_checks(kind: type[events.Event]) -> Mapping[str, Check]:
    return {name: _hint(hint) for name, hint in get_type_hints(kind).items() if name != "kind"}


_EVENTS = {name: _event_checks(kind) for name, kind in TOLD.items()}
_EVENTS["checkpoint_failed"] = {**_EVENTS["checkpoint_failed"], "name": _checkpoint}


def _event(header: Any) -> bool:
    checks, told = _EVENTS.get(header["kind"], {}), header["fields"]
    if not checks:  # of another version: left, not refused
        return True
    kind = TOLD[header["kind"]]
    optional = {"time"} | {field.name for field in fields(kind) if hasattr(kind, field.name)}
    return set(told) <= set(checks) and all(
        checks[name](told[name]) if name in told else name in optional for name in checks
    )


def is_setting(value: Any) -> bool:
    """Whether these are values of a setting."""
    known = {field.name for field in fields(Setting)}
    return isinstance(value, dict) and value.keys() <= known and _SETTING(value)


_SETTING = _form(
    {},
    fragments=lambda value: _count(value) and value >= 1,
    codec=lambda value: value is None or (_text(value) and value in CODECS),
    momentum=_maybe(_number),
    pull=_maybe(_number),
    rate=_maybe(_number),
    wait=_truth,
    caution=_count,
)
_NOTE = _form(
    {},
    rows=_count,
    publish=_count,
    evaluate=_truth,
    save=_maybe(_count),
    stop=_maybe(_text),
    setting=is_setting,
    since=_count,
    trial=_or_empty(_form({"number": _count})),
    counts=_list(lambda value: type(value) is int and abs(value) < _MOST),
    number=_count,
    by=_text,
    n=_count,
)


def is_note(value: Any) -> bool:
    """Whether a worker may say this with a round; fields of another version are left.

    >>> is_note({"rows": 5}), is_note({"rows": "many"}), is_note([])
    (True, False, False)
    """
    whole = _NOTE(value) and ("setting" not in value or "since" in value)
    return whole and not any(isinstance(v, float) and not math.isfinite(v) for v in value.values())


FORMS: dict[str, Check] = {
    "join": _form(
        {"a": _count, "address": _text},
        host=_text,
        pid=_count,
        rows=_count,
        meets=_maybe(_text),
        thinwire=_text,
    ),
    "fetch": _form({"a": _count, "name": _shard, "i": lambda value: _count(value) and value < 2**31}),
    "beat": _form(
        {"a": _count, "landed": _count, "bytes": _count},
        received=_count,
        refused=_count,
        waiting=_maybe(_table(_list(_count))),
        progress=_or_empty(_PROGRESS),
    ),
    "prepared": _form(
        {"a": _count, "g": _count, "landed": _count, "digest": _text, "fresh": _truth, "since": _count},
        more=_or_empty(_MORE),
    ),
    "evaluated": _form(
        {"p": _count, "sums": _table(_number), "weights": _table(_number), "rows": _count}
        | {"steps": _count, "done": _count}
    ),
    "caught": _form({"published": _count}),
    "saved": _form({"name": _checkpoint, "steps": _count, "parts": _list(_A_PART)}, fails=_truth),
    "finished": _form({}),
    "agreed": _form({}),
    "epoch": _form({"a": _count, "epoch": _count, "rows": _count}, loss=_maybe(_number)),
    "event": lambda header: _form({"kind": _text, "fields": _any_table})(header) and _event(header),
    "failed": _form({"error": _text, "traceback": _text}, kind=_text),
    "result": lambda header: _RESULT(header) and _within(header, "i", "n") and _within(header, "chunk", "chunks"),
    "apart": _form({"n": _count}),
    "bye": _form({}),
}
"""By kind, whether a header is one."""


def is_understood(header: Header) -> bool:
    """Whether the coordinator can act on a header.

    >>> is_understood({"t": "caught", "a": 0, "published": 3}), is_understood({"t": "caught", "a": 0, "published": "3"})
    (True, False)
    """
    check = FORMS.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and type(header.get("a")) is int and check(header)
