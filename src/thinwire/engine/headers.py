"""What workers may say to the coordinator and to each other, field by field. What does not fit is refused where it is
received: a worker that says something strange must not end everybody's run.
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
_ADDRESS = re.compile(
    r"tcp://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}|(memory:)?[0-9]{1,18}\.[0-9]{1,18}"
)
"""Of a socket; of a queue in this process, or of an agent that Spark's jobs visit, by worker and attempt."""
_MEETING = re.compile(r"[A-Za-z0-9._\[\]:-]{1,255}:[0-9.]{1,40}")
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


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 to 2⁶³.

    >>> is_count(3), is_count(True), is_count(3.0), is_count(-1), is_count(10**30)
    (True, False, False, False, False)
    """
    return type(value) is int and 0 <= value < _MOST


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def is_real(value: Any) -> bool:
    """Whether this is a finite number.

    >>> is_real(0.5), is_real(float("nan")), is_real(10**400)
    (True, False, False)
    """
    return _number(value) and math.isfinite(value)


def is_address(value: Any) -> bool:
    """Whether a worker may be reached there, as far as the form goes.

    >>> is_address("tcp://10.0.0.7:41234"), is_address("ipc:///tmp/x")
    (True, False)
    """
    return _text(value) and bool(_ADDRESS.fullmatch(value))


def _meeting(value: Any) -> bool:
    return _text(value) and bool(_MEETING.fullmatch(value))


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
    return _list(is_count)(value) and len(value) == 2


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
    {"steps": is_count, "rows": is_count, "position": _pair, "busy": _number, "gap_s": _number},
    loss=_maybe(_number),
    first_loss=_maybe(_number),
    stepped_s=_number,
    waited_s=_number,
    exchanged_s=_number,
    evaluated_s=_number,
    score=is_count,
    note=_any_table,
)
_MORE = _form(
    {"since": is_count, "line": is_count, "live": _list(is_count), "due": _list(is_count), "still": _list(is_count)},
    kept=_servers,
    went=_pair,
)
_RESULT = _form({"part": is_count, "chunk": is_count, "chunks": is_count, "i": is_count, "n": is_count})
_A_PART = _form({"name": _text, "size_bytes": is_count, "digest": _text})


def _hint(hint: Any) -> Check:
    """The check of a field of an event, from its annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [_hint(option) for option in get_args(hint)]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        return _list(_hint(get_args(hint)[0]))
    checks: dict[Any, Check] = {
        int: is_count,
        float: _number,
        str: _text,
        bool: _truth,
        type(None): lambda v: v is None,
    }
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
    fragments=lambda value: is_count(value) and value >= 1,
    codec=lambda value: value is None or (_text(value) and value in CODECS),
    momentum=_maybe(_number),
    pull=_maybe(_number),
    rate=_maybe(_number),
    wait=_truth,
    caution=is_count,
)
_NOTE = _form(
    {},
    rows=is_count,
    publish=is_count,
    evaluate=_truth,
    save=_maybe(is_count),
    stop=_maybe(_text),
    setting=is_setting,
    since=is_count,
    trial=_or_empty(_form({"number": is_count})),
    counts=_list(lambda value: type(value) is int and abs(value) < _MOST),
    number=is_count,
    by=_text,
    n=is_count,
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
        {"a": is_count, "address": is_address},
        host=_text,
        pid=is_count,
        rows=is_count,
        meets=_maybe(_meeting),
        thinwire=_text,
    ),
    "fetch": _form({"a": is_count, "name": _shard, "i": lambda value: is_count(value) and value < 2**31}),
    "beat": _form(
        {"a": is_count, "landed": is_count, "bytes": is_count},
        received=is_count,
        refused=is_count,
        waiting=_maybe(_table(_list(is_count))),
        progress=_or_empty(_PROGRESS),
    ),
    "prepared": _form(
        {"a": is_count, "g": is_count, "landed": is_count, "digest": _text, "fresh": _truth, "since": is_count},
        more=_or_empty(_MORE),
    ),
    "evaluated": _form(
        {"p": is_count, "sums": _table(_number), "weights": _table(_number), "rows": is_count}
        | {"steps": is_count, "done": is_count}
    ),
    "caught": _form({"published": is_count}),
    "saved": _form({"name": _checkpoint, "steps": is_count, "parts": _list(_A_PART)}, fails=_truth),
    "finished": _form({}),
    "agreed": _form({}),
    "epoch": _form({"a": is_count, "epoch": is_count, "rows": is_count}, loss=_maybe(_number)),
    "event": lambda header: _form({"kind": _text, "fields": _any_table})(header) and _event(header),
    "failed": _form({"error": _text, "traceback": _text}, kind=_text),
    "result": lambda header: _RESULT(header) and _within(header, "i", "n") and _within(header, "chunk", "chunks"),
    "apart": _form({"n": is_count}),
    "bye": _form({}),
}
"""By kind, whether a header is one."""


_ROUND = {"r": _text, "s": _pair, "k": lambda value: _text(value) and value in CODECS, "c": is_count}
_A_TUPLE = {"k": is_count}
_A_NAME = {"p": _pair}


def _among(needed: Mapping[str, Check], **more: Check) -> Check:
    """A message between workers: its generation, and the sender's attempt."""
    return _form({"g": is_count, "a": is_count, **needed}, **more)


AMONG_WORKERS: dict[str, Check] = {
    "part": _among(_ROUND | {"w": is_real}, n=_any_table),
    "sum": _among(_ROUND | {"i": _list(is_count)}, n=_table(_any_table), e=_truth),
    "open": _among(_ROUND),
    "want": _among({}),
    "state": _among({"i": is_count, "n": is_count, "d": is_count}),
    "update": _among(_A_TUPLE | {"n": is_count, "w": is_real}, rate=_maybe(is_real), over=_truth),
    "reply": _among(_A_TUPLE | {"n": is_count, "v": is_count, "to": is_count, "e": _truth}),
    "get": _among(_A_TUPLE),
    "value": _among(_A_TUPLE),
    "move": _among(_A_TUPLE),
    "moved": _among(_A_TUPLE),
    "copy": _among(_A_TUPLE | {"v": _pair}),
    "mark": _among(_A_NAME | {"n": _any_table}),
    "page": _among(_A_TUPLE | _A_NAME | {"whole": _truth}),
    "have": _among(_A_NAME),
    "go": _among(_A_NAME),
    "note": _among({"n": _any_table}),
    "done": _among({"d": _truth}),
}
"""By kind, whether a header of a worker to another is one; what is in a note is looked at where it is taken up."""


def is_among_workers(header: Header) -> bool:
    """Whether a worker can act on another's header.

    >>> is_among_workers({"t": "want", "g": 1, "a": 0}), is_among_workers({"t": "want", "g": -1, "a": 0})
    (True, False)
    """
    check = AMONG_WORKERS.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and check(header)


def are_marks(value: Any) -> bool:
    """Whether these are the three numbers of a mark (`thinwire.exchange.sure`).

    >>> are_marks([12, 9, 5]), are_marks([float("inf"), 0, 0]), are_marks([1, 2])
    (True, False, False)
    """
    return _list(is_count)(value) and len(value) == 3


def is_understood(header: Header) -> bool:
    """Whether the coordinator can act on a header.

    >>> is_understood({"t": "caught", "a": 0, "published": 3}), is_understood({"t": "caught", "a": 0, "published": "3"})
    (True, False)
    """
    check = FORMS.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and type(header.get("a")) is int and check(header)
