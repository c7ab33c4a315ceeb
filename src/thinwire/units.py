"""Quantities as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from thinwire.errors import ConfigError

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SIZES = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def quantity(name: str, text: str, units: Mapping[str, float]) -> float:
    """A number and a unit.

    >>> quantity("--memory", "1.5 GiB", SIZES)
    1610612736.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units or not 0 < float(found[1]) * units[found[2]] < math.inf:
        raise ConfigError(f"{name} {text!r} is not understood; write a number above 0 and one of {', '.join(units)}")
    return float(found[1]) * units[found[2]]


def rate_bits(rate: str, name: str = "rate") -> float:
    """Bits per second of a rate.

    >>> rate_bits("100mbit")
    100000000.0
    """
    return quantity(name, rate, RATES)


def rate_bytes(rate: str | float, name: str = "cluster.link") -> float:
    """Bytes per second of a rate, or of a number of them.

    >>> rate_bytes("1gbit"), rate_bytes(5e6)
    (125000000.0, 5000000.0)
    """
    if isinstance(rate, str):
        return rate_bits(rate, name) / 8
    if not rate > 0:
        raise ConfigError(f"{name} = {rate} is not possible; use bytes a second above 0, or a rate such as '1gbit'")
    return float(rate)
