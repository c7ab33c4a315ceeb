"""Quantities with units, as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from thinwire.errors import ConfigError

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SIZES = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def quantity(name: str, text: str, units: Mapping[str, float]) -> float:
    """Parses a number with a unit.

    >>> quantity("--memory", "1.5 GiB", SIZES)
    1610612736.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units or not 0 < float(found[1]) * units[found[2]] < math.inf:
        raise ConfigError(
            f"{name} {text!r} is not understood; write a number above 0 and a unit, one of {', '.join(units)}"
        )
    return float(found[1]) * units[found[2]]


def rate_bits(rate: str, name: str = "rate") -> float:
    """Parses a rate into bits per second.

    >>> rate_bits("100mbit")
    100000000.0
    """
    return quantity(name, rate, RATES)


def rate_bytes(rate: str | float, name: str = "cluster.link") -> float:
    """Bytes per second, from a rate with a unit or from a number of bytes per second.

    >>> rate_bytes("1gbit"), rate_bytes(5e6)
    (125000000.0, 5000000.0)
    """
    if isinstance(rate, str):
        return rate_bits(rate, name) / 8
    if not rate > 0:
        raise ConfigError(f"{name} = {rate} is not possible; use bytes a second above 0, or a rate such as '1gbit'")
    return float(rate)


def rate_text(bytes_per_s: float) -> str:
    """A rate with a unit, to two digits.

    >>> rate_text(12.6e6), rate_text(5e3), rate_text(260e6), rate_text(60)
    ('100 Mbit/s', '40 kbit/s', '2.1 Gbit/s', 'less than 1 kbit/s')
    """
    bits = bytes_per_s * 8
    if bits < 1e3:
        return "less than 1 kbit/s"
    bits = float(f"{bits:.2g}")
    unit, name = next((size, name) for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bits >= size)
    return f"{bits / unit:g} {name}bit/s"


def seconds_text(seconds: float) -> str:
    """A duration with a unit, to two digits.

    >>> seconds_text(0.0123), seconds_text(2.06), seconds_text(134), seconds_text(3e-5)
    ('12 ms', '2.1 s', '134 s', '0.03 ms')
    """
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{float(f'{seconds:.2g}'):g} s"
    return f"{float(f'{seconds * 1e3:.2g}'):g} ms"
