"""Checks of the type and range of single values that a user gives; errors name the key, the value and what to do."""

from __future__ import annotations

import math
import numbers
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.errors import ConfigError, nearest

Check = Callable[[str, Any], Any]
"""Takes a key and its value; returns the value as a plain type, or raises ConfigError."""
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 120


def refused(key: str, value: Any, allowed: str) -> ConfigError:
    """The error for a value that is not allowed; `allowed` says what to write instead."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"{_shown.repr(value)}"
    what = "" if isinstance(value, (type, str, bool, int, float)) or value is None else f" ({type(value).__name__})"
    return ConfigError(f"{key} = {kind}{what} is not possible; use {allowed}")


def whole(least: int, most: int | None = None) -> Check:
    """A whole number of `least` or more; refuses booleans and floats, such as 2.0."""

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise refused(key, value, f"a whole number of {least} or more")
        found = int(value)
        if found < least:
            raise ConfigError(f"{key} = {found} is too small; use a whole number of {least} or more")
        if most is not None and found > most:
            raise ConfigError(f"{key} = {found} is too large; use a whole number of at most {most}")
        return found

    return check


def number(*, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number of `least` or more, above `above`, and at most `most`."""
    if above > -math.inf:
        allowed = f"a number above {above:g}"
    else:
        allowed = f"a number of {least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"

    def check(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refused(key, value, allowed)
        found = int(value) if isinstance(value, numbers.Integral) else float(value)
        if not (math.isfinite(found) and found >= least and found > above and found <= most):
            raise refused(key, found, allowed)
        return found

    return check


def choice(*allowed: str) -> Check:
    """One of these words."""

    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(f"{key} = {_shown.repr(value)} is not known. {nearest(str(value), allowed)}")
        return value

    return check


def text(example: str) -> Check:
    """A text that is not empty."""

    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise refused(key, value, f"a text such as {example}")
        return value

    return check


def place(key: str, value: Any) -> str:
    """A folder or URL, as a text or a path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise refused(key, value, "the path of a folder, or a URL")
    return str(os.fspath(value))


def truth(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refused(key, value, "True or False")
    return value


def count_or_auto(key: str, value: Any) -> int | str:
    """A whole number of 1 or more, or "auto"."""
    if isinstance(value, str) and value == "auto":
        return value
    if isinstance(value, str):
        raise ConfigError(f"{key} = {_shown.repr(value)} is not a count; use 1 or more, or 'auto'")
    found: int = whole(1)(key, value)
    return found


def instance(kind: type | tuple[type, ...], example: str) -> Check:
    """An object of a class, not the class itself."""

    def check(key: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise refused(key, value, example)
        return value

    return check


def function(example: str) -> Check:
    """Any callable that is not a class."""

    def check(key: str, value: Any) -> Any:
        if not callable(value) or isinstance(value, type):
            raise refused(key, value, example)
        return value

    return check


def optional(check: Check) -> Check:
    """A check that also takes None."""
    return lambda key, value: None if value is None else check(key, value)


def check_fields(owner: Any, path: str, **checks: Check) -> None:
    """Checks fields of a dataclass; keys are named `path.field`."""
    for name, check in checks.items():
        check(f"{path}.{name}", getattr(owner, name))


def named(key: str, given: Mapping[str, Any], example: str, word: str = "name") -> tuple[str, dict[str, Any]]:
    """Splits the form of an object in a recipe, `{name = "sgd", lr = 0.1}`, into its name and its settings."""
    settings = {str(name): value for name, value in given.items()}
    name = settings.pop(word, None)
    if not isinstance(name, str):
        raise ConfigError(f"{key} = {_shown.repr(dict(given))} has no {word}; write {key} = {example}")
    return name, settings


def known_only(path: str, given: Mapping[str, Any], allowed: tuple[str, ...], owner: str) -> None:
    """Refuses settings that an object does not have, and names the nearest one."""
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{path}.{name} is not a setting of {owner}. {nearest(name, allowed)}")
