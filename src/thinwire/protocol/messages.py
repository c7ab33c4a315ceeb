"""Messages between the coordinator and workers, and among workers: every kind with its fields and their limits.

The receiver refuses a message that does not have the form of its kind, so that one faulty worker cannot end the run.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from thinwire import events
from thinwire.rules.compression import CODECS

COORDINATOR = -1
"""The coordinator's number among peers."""
ANY_ATTEMPT = -1
"""In place of an attempt's number: whichever attempt is there."""

Header = dict[str, Any]
"""A message's JSON part. Its "t" names the kind of message."""


class Message(NamedTuple):
    """One message: its sender, its header, and a payload of raw bytes where it has one."""

    sender: int
    header: Header
    payload: memoryview | None = None


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


def is_number(value: Any) -> bool:
    """Whether this is a number, finite or not."""
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def is_text(value: Any) -> bool:
    """Whether this is a text."""
    return isinstance(value, str)


def is_real(value: Any) -> bool:
    """Whether this is a finite number.

    >>> is_real(0.5), is_real(float("nan")), is_real(10**400)
    (True, False, False)
    """
    return is_number(value) and math.isfinite(value)


def is_address(value: Any) -> bool:
    """Whether a worker may be reached there, as far as the form goes.

    >>> is_address("tcp://10.0.0.7:41234"), is_address("ipc:///tmp/x")
    (True, False)
    """
    return is_text(value) and bool(_ADDRESS.fullmatch(value))


def _meeting(value: Any) -> bool:
    return is_text(value) and bool(_MEETING.fullmatch(value))


def is_truth(value: Any) -> bool:
    """Whether this is true or false."""
    return isinstance(value, bool)


def is_table(value: Any) -> bool:
    """Whether this is a JSON object."""
    return isinstance(value, dict)


def maybe(check: Check) -> Check:
    """A check that also takes null."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """A check of a list, item by item."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def table_of(check: Check) -> Check:
    """A check of a JSON object, value by value."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _pair(value: Any) -> bool:
    return list_of(is_count)(value) and len(value) == 2


def form(needed: Mapping[str, Check], **more: Check) -> Check:
    """A check of a JSON object that has the needed fields, and may have the others."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or not all(name in value and fits(value[name]) for name, fits in needed.items()):
            return False
        return all(fits(value[name]) for name, fits in more.items() if name in value)

    return check


def or_empty(check: Check) -> Check:
    """A check that also takes null and an empty object."""
    return lambda value: value is None or value == {} or check(value)


def _checkpoint(value: Any) -> bool:
    return is_text(value) and bool(_SAVE.fullmatch(value))


def _within(header: Header, number: str, count: str) -> bool:
    return bool(header[number] < header[count] <= MOST_PIECES)


def _shard(value: Any) -> bool:
    return value in ("train", "validation")


def _servers(value: Any) -> bool:
    """Checkpoints by server, whose number is a key of JSON."""
    return table_of(list_of(_pair))(value) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)


_PROGRESS = form(
    {"steps": is_count, "rows": is_count, "position": _pair, "busy": is_number, "gap_s": is_number},
    loss=maybe(is_number),
    first_loss=maybe(is_number),
    stepped_s=is_number,
    waited_s=is_number,
    exchanged_s=is_number,
    evaluated_s=is_number,
    score=is_count,
    note=is_table,
)
_MORE = form(
    {
        "since": is_count,
        "line": is_count,
        "live": list_of(is_count),
        "due": list_of(is_count),
        "still": list_of(is_count),
    },
    kept=_servers,
    went=_pair,
)
_RESULT = form({"part": is_count, "chunk": is_count, "chunks": is_count, "i": is_count, "n": is_count})
_A_PART = form({"name": is_text, "size_bytes": is_count, "digest": is_text})


def _hint(hint: Any) -> Check:
    """The check of a field of an event, from its annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [_hint(option) for option in get_args(hint)]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        return list_of(_hint(get_args(hint)[0]))
    checks: dict[Any, Check] = {
        int: is_count,
        float: is_number,
        str: is_text,
        bool: is_truth,
        type(None): lambda v: v is None,
    }
    return checks.get(hint, is_table)


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


FORMS: dict[str, Check] = {
    "join": form(
        {"a": is_count, "address": is_address},
        host=is_text,
        pid=is_count,
        rows=is_count,
        meets=maybe(_meeting),
        thinwire=is_text,
    ),
    "fetch": form({"a": is_count, "name": _shard, "i": lambda value: is_count(value) and value < 2**31}),
    "beat": form(
        {"a": is_count, "landed": is_count, "bytes": is_count},
        received=is_count,
        refused=is_count,
        waiting=maybe(table_of(list_of(is_count))),
        progress=or_empty(_PROGRESS),
    ),
    "prepared": form(
        {"a": is_count, "g": is_count, "landed": is_count, "digest": is_text, "fresh": is_truth, "since": is_count},
        more=or_empty(_MORE),
    ),
    "evaluated": form(
        {"p": is_count, "sums": table_of(is_number), "weights": table_of(is_number), "rows": is_count}
        | {"steps": is_count, "done": is_count}
    ),
    "caught": form({"published": is_count}),
    "saved": form({"name": _checkpoint, "steps": is_count, "parts": list_of(_A_PART)}, fails=is_truth),
    "finished": form({}),
    "agreed": form({}),
    "epoch": form({"a": is_count, "epoch": is_count, "rows": is_count}, loss=maybe(is_number)),
    "event": lambda header: form({"kind": is_text, "fields": is_table})(header) and _event(header),
    "failed": form({"error": is_text, "traceback": is_text}, kind=is_text),
    "result": lambda header: _RESULT(header) and _within(header, "i", "n") and _within(header, "chunk", "chunks"),
    "apart": form({"n": is_count}),
    "bye": form({}),
}
"""By kind, whether a header is one."""


def _codec(value: Any) -> bool:
    return is_text(value) and value in CODECS


_A_ROUND: dict[str, Check] = {"r": is_text, "s": _pair, "k": _codec}
_ROUND = _A_ROUND | {"c": is_count}
_A_TUPLE = {"k": is_count}
_A_NAME = {"p": _pair}


def _among(needed: Mapping[str, Check], **more: Check) -> Check:
    """A message between workers: its generation, and the sender's attempt."""
    return form({"g": is_count, "a": is_count, **needed}, **more)


AMONG_WORKERS: dict[str, Check] = {
    "part": _among(_ROUND | {"w": is_real}, n=is_table),
    "sum": _among(_ROUND | {"i": list_of(is_count)}, n=table_of(is_table), e=is_truth),
    "open": _among(_ROUND),
    "want": _among({}),
    "state": _among({"i": is_count, "n": is_count, "d": is_count}),
    "update": _among(
        _A_TUPLE | {"n": is_count, "w": is_real},
        rates=maybe(list_of(is_real)),
        absent=list_of(is_count),
        over=is_truth,
    ),
    "reply": _among(_A_TUPLE | {"n": is_count, "v": is_count, "to": is_count, "e": is_truth}),
    "get": _among(_A_TUPLE),
    "value": _among(_A_TUPLE),
    "move": _among(_A_TUPLE),
    "moved": _among(_A_TUPLE),
    "copy": _among(_A_TUPLE | {"v": _pair}),
    "mark": _among(_A_NAME | {"n": is_table}),
    "page": _among(_A_TUPLE | _A_NAME | {"whole": is_truth}),
    "have": _among(_A_NAME),
    "go": _among(_A_NAME),
    "note": _among({"n": is_table}),
    "done": _among({"d": is_truth}),
}
"""By kind, whether a header of a worker to another is one; what is in a note is looked at where it is taken up."""

FROM_SPARK: dict[str, Check] = {
    "open": form({"g": is_count, **_A_ROUND}),
    "sum": form({"g": is_count, **_A_ROUND, "m": _codec, "n": table_of(is_table), "x": list_of(is_count)}),
}
"""By kind, whether a header of the driver or a task that sums rounds over Spark is one."""


def is_among_workers(header: Header) -> bool:
    """Whether a worker can act on another's header.

    >>> is_among_workers({"t": "want", "g": 1, "a": 0}), is_among_workers({"t": "want", "g": -1, "a": 0})
    (True, False)
    """
    check = AMONG_WORKERS.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and check(header)


def is_from_spark(header: Header) -> bool:
    """Whether a worker can act on a header of what sums rounds over Spark.

    >>> is_from_spark({"t": "open", "g": 1, "r": "train:3", "s": [0, 8], "k": "float32"}), is_from_spark({"t": "open"})
    (True, False)
    """
    check = FROM_SPARK.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and check(header)


def are_marks(value: Any) -> bool:
    """Whether these are the three numbers of a mark (`thinwire.transport.reliable`).

    >>> are_marks([12, 9, 5]), are_marks([float("inf"), 0, 0]), are_marks([1, 2])
    (True, False, False)
    """
    return list_of(is_count)(value) and len(value) == 3


def is_understood(header: Header) -> bool:
    """Whether the coordinator can act on a header.

    >>> is_understood({"t": "caught", "a": 0, "published": 3}), is_understood({"t": "caught", "a": 0, "published": "3"})
    (True, False)
    """
    check = FORMS.get(header["t"]) if isinstance(header.get("t"), str) else None
    return check is not None and type(header.get("a")) is int and check(header)
