"""What a target is: a decoder that is given any bytes, and the true inputs that a fuzzer begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """One decoder. `run` raises only where the product does what it must not."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    """Made by the product's own encoders."""
    decoder: str
    """What it reads, in words."""
    most_bytes: int = 512
    words: tuple[bytes, ...] = ()
    """Pieces of the format, for the fuzzer to put in."""
    changes: int = 3000
    """Changed inputs that a test tries; fewer where each takes long."""
