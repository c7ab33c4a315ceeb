"""Strategies by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thinwire.errors import ConfigError, nearest
from thinwire.strategies.auto import Auto
from thinwire.strategies.base import Strategy
from thinwire.strategies.deepspark import DeepSpark
from thinwire.strategies.diloco import DiLoCo
from thinwire.strategies.easgd import EASGD
from thinwire.strategies.mpca import MPCA
from thinwire.strategies.parameter_table import ParameterTable
from thinwire.strategies.relay import Relay
from thinwire.strategies.sparknet import SparkNet
from thinwire.strategies.synchronous import Synchronous

STRATEGIES: dict[str, type[Strategy]] = {
    "auto": Auto,
    "deepspark": DeepSpark,
    "diloco": DiLoCo,
    "easgd": EASGD,
    "mpca": MPCA,
    "parameter_table": ParameterTable,
    "relay": Relay,
    "sparknet": SparkNet,
    "synchronous": Synchronous,
}


def strategy(name: str, knobs: Mapping[str, object] | None = None) -> Strategy:
    """The strategy called `name` with its knobs; names not understood are refused with the nearest."""
    if not isinstance(name, str) or name not in STRATEGIES:  # a recipe may say anything
        raise ConfigError(f"strategy.name = {name!r} is not known. {nearest(str(name), STRATEGIES)}")
    kind = STRATEGIES[name]
    allowed = {field.name for field in dataclasses.fields(kind)}
    for key in knobs or {}:
        if key not in allowed:
            raise ConfigError(f"strategy.{key} is not a knob of {name!r}. {nearest(key, allowed)}")
    return kind(**(knobs or {}))


def name_of(chosen: Strategy) -> str:
    """The registered name of a strategy, or its class's own in lower case."""
    for name, kind in STRATEGIES.items():
        if type(chosen) is kind:
            return name
    return type(chosen).__name__.lower()
