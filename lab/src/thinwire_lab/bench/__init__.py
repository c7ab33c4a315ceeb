"""The measured comparisons: `thinwire bench NAME`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from thinwire.errors import ConfigError, nearest
from thinwire_lab.bench.report import Report, Say

BENCHES = {
    "codecs": "codecs",
    "comparison": "comparison",
    "convergence": "convergence",
    "dashboard": "dashboard",
    "deaths": "deaths",
    "exchange": "exchange",
    "finite": "finite",
    "forecast": "forecast",
    "ingest": "frames",
    "overhead": "overhead",
    "placement": "placement",
    "predict": "frames",
    "strangers": "strangers",
    "table": "table",
    "wire": "wire",
}
"""By name, the module of this package that defines a function of the same name."""

__all__ = ["BENCHES", "Report", "run"]


def run(name: str, *, quick: bool, say: Say) -> Report:
    """Runs a benchmark by name."""
    if name not in BENCHES:
        raise ConfigError(f"bench {name!r} is not known. {nearest(name, (*BENCHES, 'suite'))}")
    module = importlib.import_module(f"thinwire_lab.bench.{BENCHES[name]}")
    return cast(Callable[[bool, Say], Report], getattr(module, name))(quick, say)
