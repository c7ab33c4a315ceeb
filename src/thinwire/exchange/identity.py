"""What a worker's end of the mesh is given: who it is, and how trees become bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Identity(NamedTuple):
    """Who this worker is, and what it says of itself when it joins."""

    worker: int
    attempt: int
    hello: dict[str, Any]


class TreeCodec(NamedTuple):
    """How trees become bytes and back; the checkpoint format, handed in."""

    encode: Callable[[object], bytes]
    decode: Callable[[bytes], object]
