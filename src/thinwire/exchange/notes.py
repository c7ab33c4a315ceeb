"""Notes: what a worker says beside its contribution to a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from thinwire.parameters import Fragment
from thinwire.protocol.forms import form, is_count, is_number, is_real, is_text, is_truth, list_of, maybe, or_empty
from thinwire.rules.compression import is_codec
from thinwire.rules.noise import noise_of
from thinwire.rules.optimizer import MOVING
from thinwire.strategies import Setting, Taken

Note = dict[str, object]
"""What a worker says, by name; `is_note` has the names."""

_SETTING = form(
    {},
    fragments=lambda value: is_count(value) and value >= 1,
    codec=lambda value: value is None or (is_text(value) and is_codec(value)),
    momentum=maybe(is_number),
    pull=maybe(is_number),
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


def _is_taken(value: Any) -> bool:
    """Whether this is what a contribution of summed gradients holds: weight of rows, steps, and steps made before."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    rows, steps, before = value
    return is_real(rows) and rows > 0 and is_count(steps) and steps > 0 and is_count(before)


def _is_group(value: Any) -> bool:
    """Whether these are settings of a group of an optimizer that schedules move."""
    return isinstance(value, dict) and value.keys() <= set(MOVING) and all(map(_is_moved, value.values()))


def _is_stretch(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_count, value)) and value[0] < value[1]


def _is_moved(value: Any) -> bool:
    return is_real(value) or (isinstance(value, list) and len(value) == 2 and all(map(is_real, value)))


_NOTE = form(
    {},
    rows=is_count,
    absent=list_of(is_count),
    taken=_is_taken,
    groups=list_of(_is_group),
    square=is_real,
    still=list_of(_is_stretch),
    spread=is_real,
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


def taken_of(notes: Mapping[int, Mapping[str, Any]], fragment: Fragment) -> Taken | None:
    """What the joint optimizer is to know of a round of summed gradients; None where nobody contributed.

    Weights of rows are averaged as contributions are; steps count by them, so that who sees few rows says little of how
    many steps the mean is of. A parameter is absent where nobody has a gradient of it.
    """
    given = [notes[worker] for worker in sorted(notes) if "taken" in notes[worker]]
    if not given:
        return None
    rows = [note["taken"][0] for note in given]
    of_each = [(note["taken"][1], note["taken"][2]) for note in given]
    total = math.fsum(rows)
    steps, before = (math.fsum(w * counts[i] for w, counts in zip(rows, of_each, strict=True)) / total for i in (0, 1))
    groups = [note.get("groups", []) for note in given]
    spread = next((float(note["spread"]) for note in given if "spread" in note), 1.0)  # one that all of them hear
    taken = max(1, round(steps))
    return Taken(
        fragment,
        rows=total / len(rows),
        steps=taken,
        before=round(before),
        noise=noise_of(taken, len(given), spread),
        groups=tuple(map(_mean_of, zip(*groups, strict=False))),
        absent=frozenset.intersection(*(frozenset(note.get("absent", ())) for note in given)),
    )


def _mean_of(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of a group's settings that all workers say.

    >>> _mean_of([{"lr": 0.5, "betas": [0.5, 0.75]}, {"lr": 1.5, "betas": [1.0, 0.75]}])
    {'lr': 1.0, 'betas': (0.75, 0.75)}
    """
    found: dict[str, Any] = {}
    for name in MOVING:
        values = [group[name] for group in said if name in group]
        if len(values) == len(said) and all(isinstance(value, list) for value in values):
            found[name] = tuple(math.fsum(each) / len(said) for each in zip(*values, strict=True))
        elif len(values) == len(said) and not any(isinstance(value, list) for value in values):
            found[name] = math.fsum(values) / len(said)
    return found


def is_note(value: Any) -> bool:
    """Whether this is a note. Fields that this version does not know are allowed.

    >>> is_note({"rows": 5}), is_note({"rows": "many"}), is_note([])
    (True, False, False)
    """
    whole = _NOTE(value) and ("setting" not in value or "since" in value)
    return whole and not any(isinstance(v, float) and not math.isfinite(v) for v in value.values())


def as_note(value: Any) -> Note:
    """A copy of a note that came; raises where it is none."""
    if not is_note(value):
        raise ValueError("a note is a table of what workers say with rounds")
    return dict(value)
