"""A copy of a fragment that whoever comes first makes.

A replica's vector rests while its gradient is computed. A round is launched at the start of that time: the exchange
thread copies the fragment meanwhile, and the stepping thread only if the other has not come to it before the vector
moves on.
"""

from __future__ import annotations

import threading

from torch import Tensor


class Snapshot:
    """A fragment of a vector that will be copied once, into `out`."""

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source: Tensor | None = source
        self._out = out
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        """The copy, made now unless it has been made."""
        with self._lock:
            if self._source is not None:
                self._out.copy_(self._source)
                self._source = None
            return self._out
