"""Checks that strategies make on their knobs."""

from __future__ import annotations

from thinwire.errors import ConfigError


def at_least(owner: object, least: float, **knobs: float | None) -> None:
    """Refuses a knob below `least`; None is left to its default."""
    for name, value in knobs.items():
        if value is not None and not (_is_number(value) and value >= least):
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not possible; use a number of {least} or more")


def within(owner: object, least: float, most: float, **knobs: float | None) -> None:
    """Refuses a knob outside [least, most]."""
    for name, value in knobs.items():
        if value is not None and not (_is_number(value) and least <= value <= most):
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not possible; use a number from {least} to {most}")


def count_or(owner: object, *words: str, **knobs: object) -> None:
    """Refuses a knob that is neither a count nor one of these words."""
    for name, value in knobs.items():
        if value not in words and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            allowed = ", ".join(map(repr, words))
            raise ConfigError(
                f"{_path(owner, name)} = {value!r} is not possible; use {allowed}, or a count of 1 or more"
            )


def one_of(owner: object, allowed: tuple[object, ...], **knobs: object) -> None:
    """Refuses a knob that is none of the allowed values."""
    for name, value in knobs.items():
        if value not in allowed:
            raise ConfigError(f"{_path(owner, name)} = {value!r} is not known; use one of {list(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _path(owner: object, name: str) -> str:
    return f"{type(owner).__name__}.{name}"
