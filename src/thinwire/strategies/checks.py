"""Checks that strategies make on their knobs."""

from __future__ import annotations

from thinwire.errors import ConfigError


def at_least(owner: object, least: float, **knobs: float | None) -> None:
    """Refuses a knob below `least`, and a fraction where a whole number is meant; None is left to its default."""
    for name, value in knobs.items():
        kind = _kind(owner, name)
        if value is not None and not (_is_a(kind, value) and value >= least):
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not possible; use a {kind} of {least} or more")


def within(owner: object, least: float, most: float, **knobs: float | None) -> None:
    """Refuses a knob outside [least, most], and a fraction where a whole number is meant."""
    for name, value in knobs.items():
        kind = _kind(owner, name)
        if value is not None and not (_is_a(kind, value) and least <= value <= most):
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not possible; use a {kind} from {least} to {most}")


def length(owner: object, **knobs: float) -> None:
    """Refuses a length that is neither a whole number of 1 or more nor a share of the run, above 0 and below 1."""
    for name, value in knobs.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value < 1 or (value >= 1 and value == int(value))):
            raise ConfigError(
                f"{_path(owner, name)} = {value!r} is not possible; use a whole number of 1 or more, or a share of the "
                "run above 0 and below 1"
            )


def count_or(owner: object, *words: str, **knobs: object) -> None:
    """Refuses a knob that is neither a count nor one of these words."""
    for name, value in knobs.items():
        if value not in words and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            allowed = ", ".join(map(repr, words))
            raise ConfigError(
                f"{_path(owner, name)} = {value!r} is not possible; use {allowed}, or a count of 1 or more"
            )


def one_of(owner: object, allowed: tuple[object, ...], **knobs: object) -> None:
    """Refuses a knob that is none of the allowed values; True is no 1, and 1 is not True."""
    for name, value in knobs.items():
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not known; use one of {list(allowed)}")


def _kind(owner: object, name: str) -> str:
    """What a knob is, by the annotation of its field."""
    field = getattr(owner, "__dataclass_fields__", {}).get(name)
    return "whole number" if field is not None and str(field.type).startswith("int") else "number"


def _is_a(kind: str, value: object) -> bool:
    return isinstance(value, int if kind == "whole number" else int | float) and not isinstance(value, bool)


def _path(owner: object, name: str) -> str:
    return f"{type(owner).__name__}.{name}"
