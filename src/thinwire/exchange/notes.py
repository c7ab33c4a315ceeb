"""Notes: what a worker says beside its contribution to a round."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from thinwire.protocol.forms import form, is_count, is_number, is_real, is_text, is_truth, list_of, maybe, or_empty
from thinwire.rules.compression import CODECS
from thinwire.strategies import Setting

_SETTING = form(
    {},
    fragments=lambda value: is_count(value) and value >= 1,
    codec=lambda value: value is None or (is_text(value) and value in CODECS),
    momentum=maybe(is_number),
    pull=maybe(is_number),
    rate=maybe(is_number),
    group=is_count,
    cycles=maybe(is_number),
    wait=is_truth,
    caution=is_count,
)


def is_setting(value: Any) -> bool:
    """Whether this is a setting as JSON."""
    known = {field.name for field in fields(Setting)}
    return isinstance(value, dict) and value.keys() <= known and _SETTING(value)


def _is_evaluation(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 5 or not all(map(is_count, value[:2])):
        return False
    loss, weight, workers = value[2:]
    return maybe(is_real)(loss) and is_real(weight) and weight > 0 and maybe(list_of(is_count))(workers)


_NOTE = form(
    {},
    rows=is_count,
    absent=list_of(is_count),
    publish=is_count,
    evaluate=is_truth,
    save=maybe(is_count),
    stop=maybe(is_text),
    setting=is_setting,
    since=is_count,
    trial=or_empty(form({"number": is_count})),
    counts=list_of(lambda value: type(value) is int and abs(value) < 2**63),
    number=is_count,
    by=is_text,
    n=is_count,
    search=_is_evaluation,
)


def is_note(value: Any) -> bool:
    """Whether this is a note. Fields that this version does not know are allowed.

    >>> is_note({"rows": 5}), is_note({"rows": "many"}), is_note([])
    (True, False, False)
    """
    whole = _NOTE(value) and ("setting" not in value or "since" in value)
    return whole and not any(isinstance(v, float) and not math.isfinite(v) for v in value.values())
