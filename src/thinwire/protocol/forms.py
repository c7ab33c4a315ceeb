"""The form of a message: its fields, their checks, and the conversion of a dataclass to a JSON header and back.

A message is a frozen dataclass. The annotation of each of its fields carries a `Field`: the name in the header, the
check of the value there, and the two conversions. The receiver refuses a header that does not have the form of its
kind, so that one faulty worker cannot end the run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

from thinwire.errors import ProtocolError

Header = dict[str, Any]
"""The JSON part of a message. Its key "t" names the kind of message."""
Check = Callable[[Any], bool]
_MOST = 2**63


def _same(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """One field of a message on the wire."""

    name: str
    check: Check
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same


class Body(Protocol):
    """A message: a frozen dataclass whose fields are annotated with a `Field` each."""

    tag: ClassVar[str]
    """The name of the kind of message, in the header."""


class _Slot(NamedTuple):
    attribute: str
    field: Field
    default: Any


@functools.cache
def _slots(kind: type) -> tuple[_Slot, ...]:
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        (wired,) = (extra for extra in hints[field.name].__metadata__ if isinstance(extra, Field))
        found.append(_Slot(field.name, wired, field.default))
    return tuple(found)


def header_of(body: Body) -> Header:
    """The header of a message; fields with their default value are left out."""
    header: Header = {"t": body.tag}
    for attribute, field, default in _slots(type(body)):
        value = getattr(body, attribute)
        if default is dataclasses.MISSING or value != default:
            header[field.name] = field.write(value)
    return header


class Kinds(Mapping[str, type]):
    """The kinds of message that one side may send to another."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds: dict[str, type] = {kind.tag: kind for kind in kinds}  # type: ignore[attr-defined]

    def __getitem__(self, tag: str) -> type:
        return self._kinds[tag]

    def __iter__(self) -> Any:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def decode(self, header: Header) -> Any:
        """Builds the message of a header.

        Raises:
            ProtocolError: The header does not have the form of one of these kinds.
        """
        tag = header.get("t") if isinstance(header, dict) else None
        kind = self._kinds.get(tag) if isinstance(tag, str) else None
        if kind is None:
            raise ProtocolError(f"a message of kind {tag!r:.80} is not one of {', '.join(self._kinds)}")
        values = {}
        for attribute, field, default in _slots(kind):
            if field.name not in header:
                if default is dataclasses.MISSING:
                    raise ProtocolError(f"a message of kind {tag!r} lacks its field {field.name!r}")
                continue
            value = header[field.name]
            if not field.check(value):
                raise ProtocolError(f"the field {field.name!r} of a message of kind {tag!r} cannot be {value!r:.80}")
            values[attribute] = field.read(value)
        body = kind(**values)
        if not getattr(body, "is_possible", True):
            raise ProtocolError(f"the fields of a message of kind {tag!r} do not go together: {header!r:.200}")
        return body


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 to 2⁶³.

    >>> is_count(3), is_count(True), is_count(3.0), is_count(-1), is_count(10**30)
    (True, False, False, False, False)
    """
    return type(value) is int and 0 <= value < _MOST


def is_number(value: Any) -> bool:
    """Whether a value is a number, finite or not."""
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def is_real(value: Any) -> bool:
    """Whether a value is a finite number.

    >>> is_real(0.5), is_real(float("nan")), is_real(10**400)
    (True, False, False)
    """
    return is_number(value) and math.isfinite(value)


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def is_truth(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def is_table(value: Any) -> bool:
    """Whether a value is a JSON object."""
    return isinstance(value, dict)


def maybe(check: Check) -> Check:
    """A check that also takes null."""
    return lambda value: value is None or check(value)


def or_empty(check: Check) -> Check:
    """A check that also takes null and an empty object."""
    return lambda value: value is None or value == {} or check(value)


def list_of(check: Check) -> Check:
    """A check of a list, item by item."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def table_of(check: Check) -> Check:
    """A check of a JSON object, value by value."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def by_number(check: Check) -> Check:
    """A check of a JSON object whose keys are numbers."""
    return lambda value: (
        table_of(check)(value) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
    )


def is_pair(value: Any) -> bool:
    """Whether a value is a list of two counts."""
    return list_of(is_count)(value) and len(value) == 2


def form(needed: Mapping[str, Check], **more: Check) -> Check:
    """A check of a JSON object that has all `needed` fields, and may have those of `more`."""

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or not all(name in value and fits(value[name]) for name, fits in needed.items()):
            return False
        return all(fits(value[name]) for name, fits in more.items() if name in value)

    return check
