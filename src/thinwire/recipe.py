"""A run as TOML: the schema as dataclasses. Keys and values that are not understood are refused."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from thinwire.errors import ConfigError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    zoo: str | None = None
    factory: str | None = None
    caffe: str | None = None
    weights: str | None = None
    modules: list[str] | None = None
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class DataSection:
    source: str | list[str] | None = None
    inputs: list[str] | None = None
    label: str | None = "label"
    weight: str | None = None
    validation: float | int | str | None = None
    transform: str | dict[str, Any] | None = None
    table: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    epochs: int | None = None
    steps: int | None = None
    seconds: float | int | None = None
    until: str | None = None
    batch_size: int | None = None
    loss: str | None = None
    algorithm: str | dict[str, Any] = "back_propagation"
    optimizer: str | dict[str, Any] = "sgd"
    scheduler: str | dict[str, Any] | None = None
    solver: str | None = None
    seed: int = 0
    metrics: list[str] | None = None
    clip_norm: float | int | None = None
    on_nonfinite: str = "drop"
    precision: str = "float32"
    accumulate: int = 1
    compile: bool = False
    device: str = "auto"
    evaluate_every: int | None = None
    stop: dict[str, Any] | None = None
    restore_best: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ExchangeSection:
    kind: str = "auto"
    codec: str = "float32"


@dataclass(frozen=True, kw_only=True)
class PlacementSection:
    kind: str = "whole"
    group_size: int | str | None = None
    memory_gb: float | int | None = None
    link_gbit: float | int | None = None
    latency_ms: float | int | None = None
    microbatches: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    kind: str = "local"
    workers: int = 2
    threads: int | str = "auto"
    max_restarts: int = 8
    master: str | None = None
    repartition: bool | str = "auto"
    link: str = "1gbit"
    latency_ms: float | int = 0.1
    step_s: float | int | None = None
    ratio: float | int | None = None
    spread: float | int = 0.0
    contention: float | int = 0.0
    handling: str | float | int | None = None
    store_s: float | int = 0.0
    slow: dict[str, Any] | None = None
    faults: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class RunSection:
    out: str | None = None
    checkpoint_every: int | None = None
    dashboard: bool | str = False
    tensorboard: str | None = None
    mlflow: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run needs, as plain values. `strategy` is checked by the strategy itself."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    strategy: dict[str, Any] = field(default_factory=dict)
    exchange: ExchangeSection = field(default_factory=ExchangeSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    run: RunSection = field(default_factory=RunSection)


MOST_BYTES = 1 << 20
"""Largest size of a recipe file; those in the repository have less than two thousand bytes."""
MOST_PARTS = 32
"""Most parts of a dotted key, and levels of nested values. TOML's parser takes quadratic time in a key's parts."""
LONGEST = 10_000
"""Most characters of a text, and of a change to a recipe."""
_BEGINS = re.compile(r"[ \t]*(?:\[\[?[ \t]*)?")
_PART = re.compile(r"""(?:[\w-]+|"(?:\\.|[^"\\])*"|'[^']*')[ \t]*\.[ \t]*""")
_DOTTED = re.compile(
    r"""(?:(?:(?<![\w-])[\w-]+|"(?:\\.|[^"\\\n]){0,100}"|'[^'\n]{0,100}')[ \t]*\.[ \t]*){%d}""" % MOST_PARTS  # noqa: UP031
)
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
SHIPPED = ("autoencoder", "cifar10", "dbm", "dbn", "digits", "mnist", "rbm", "shakespeare")
"""Recipes in the wheel; pyproject.toml lists their files."""
_hints = functools.cache(get_type_hints)


def load(path: str, changes: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, from a file or shipped with thinwire, and applies `key.path=value` changes to it."""
    if os.path.isfile(path) and os.path.getsize(path) > MOST_BYTES:
        size = os.path.getsize(path)
        raise ConfigError(
            f"recipe {path!r} has {size} bytes; a recipe has at most {MOST_BYTES}. Check that the path names a recipe."
        )
    try:
        with open(path if os.path.isfile(path) else _shipped(path), "rb") as file:
            values = _parsed(file.read(MOST_BYTES + 1).decode())
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # of TOML, and of bytes that are not UTF-8
        raise ConfigError(f"recipe {path!r} is not valid TOML: {error}") from error
    for change in changes:
        apply(values, change)
    return parse(values)


def _parsed(text: str) -> dict[str, Any]:
    """Parses TOML, after refusing keys on which the parser would take quadratic time.

    A key at the beginning of a line also takes quadratic memory, so its parts are counted exactly. A key of an inline
    table takes quadratic time only, and little of it if its parts are long, so a regular expression suffices.
    """
    found = _DOTTED.search(text)
    lines = [text.count("\n", 0, found.start()) + 1] if found else []
    for number, line in enumerate(text.split("\n"), 1):
        at, parts = _BEGINS.match(line), 0
        while at is not None and parts <= MOST_PARTS:
            at, parts = _PART.match(line, at.end()), parts + 1
        if at is not None:
            lines.append(number)
    if lines:
        raise ValueError(f"line {min(lines)} has a key of more than {MOST_PARTS} parts; use fewer")
    values: dict[str, Any] = tomllib.loads(text)
    return values


def _check(values: Mapping[str, Any]) -> None:
    """Refuses values that no run needs, and values that an error message could not show."""
    waiting: list[tuple[str, int, Any]] = [("", 0, values)]
    while waiting:
        path, depth, value = waiting.pop()
        if depth > MOST_PARTS:
            raise ConfigError(f"{path[:80]}… is nested more than {MOST_PARTS} levels deep; a recipe has three")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if len(str(name)) > LONGEST:
                    raise ConfigError(f"{path or 'the recipe'} has a key of {len(name)} characters; at most {LONGEST}")
                waiting.append((f"{path}.{name}" if path else str(name), depth + 1, inner))
        elif isinstance(value, (list, tuple)):
            waiting.extend((f"{path}[{i}]", depth + 1, inner) for i, inner in enumerate(value))
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{path} is an integer of {value.bit_length()} bits; at most 64, as in TOML. Correct it.")
        elif isinstance(value, str) and len(value) > LONGEST:
            raise ConfigError(f"{path} is a text of {len(value)} characters; at most {LONGEST}. Shorten it.")


def shipped() -> dict[str, str]:
    """Paths of the recipes that come with thinwire, by name: recipes that need no other file."""
    package = os.path.dirname(os.path.abspath(__file__))
    for folder in (os.path.join(package, "recipes"), os.path.join(package, "..", "..", "recipes")):  # wheel, checkout
        if os.path.isdir(folder):
            return {name: path for name in SHIPPED if os.path.isfile(path := os.path.join(folder, f"{name}.toml"))}
    return {}


def _shipped(name: str) -> str:
    known = shipped()
    if name not in known:
        raise ConfigError(
            f"recipe {name!r} is not a file and not the name of a recipe that comes with thinwire. "
            f"{nearest(name, known)} "
            "Give one of these names, or the path of a TOML recipe."
        )
    return known[name]


def apply(values: dict[str, Any], change: str) -> None:
    """Applies one `key.path=value` to a recipe's values; the value is TOML, and a bare word is a string.

    >>> values = {"train": {"epochs": 3}}
    >>> apply(values, "train.epochs=5"); apply(values, "strategy.name=mpca"); values
    {'train': {'epochs': 5}, 'strategy': {'name': 'mpca'}}
    """
    if len(change) > LONGEST:
        raise ConfigError(
            f"--set {change[:40]!r}… has {len(change)} characters; at most {LONGEST}. Write it in a recipe."
        )
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {change!r} is not understood; write it as --set train.epochs=5")
    if len(keys) > MOST_PARTS:
        raise ConfigError(f"--set {change[:40]!r}… has a key of {len(keys)} parts; at most {MOST_PARTS}")
    target = values
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {change!r}: {key!r} is a value, not a section")
    target[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return _parsed(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def parse(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values; refuses a key that is not understood, with its path and the nearest known key."""
    _check(values)
    hints = _hints(Recipe)
    sections: dict[str, Any] = {}
    for name, content in values.items():
        if name not in hints:
            raise ConfigError(f"[{name}] is not a section of a recipe. {nearest(name, hints)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{name} = {_shown.repr(content)} is a value; write it as a section [{name}]")
        sections[name] = (
            dict(content) if hints[name] is dict or name == "strategy" else _section(hints[name], name, content)
        )
    return Recipe(**sections)


def _section(kind: Any, path: str, values: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{path}.{key} is not known. {nearest(key, hints)}")
        if not _fits(value, hints[key]):
            wanted = str(hints[key]).replace("<class '", "").replace("'>", "").replace("typing.", "")
            raise ConfigError(f"{path}.{key} = {_shown.repr(value)} is {type(value).__name__}; it must be {wanted}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    options = getattr(hint, "__args__", None) if "|" in str(hint) else None
    if options:
        return any(_fits(value, option) for option in options)
    origin = getattr(hint, "__origin__", hint)
    if origin is Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(item, hint.__args__[0]) for item in value)
    if origin in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, origin)


def sections() -> dict[str, list[str]]:
    """The keys of every section, for help texts."""
    hints = _hints(Recipe)
    return {
        name: [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else ["name", "…its knobs"]
        for name, kind in hints.items()
    }
