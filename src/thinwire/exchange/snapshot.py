"""A copy of a fragment that whoever comes first makes.

A round is launched between two steps, and a replica's vector rests while the next gradient is computed: the exchange
thread copies the fragment meanwhile, and the stepping thread only if the other has not come to it before the vector
moves on. A strategy that shifts the replica before its gradient moves it at once.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.buffer_pool import BufferPool


def snapshot_of(source: Tensor, spares: BufferPool) -> Snapshot:
    """A snapshot of part of a vector, wherever it lies."""
    return DeviceSnapshot(source) if source.is_cuda else Snapshot(source, spares.take(source.numel()))


class Snapshot:
    """A fragment of a vector that will be copied once, into `out`."""

    near: Tensor | None = None
    """The copy where the vector lies, if that is not the host."""

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source: Tensor | None = source
        self._out = out
        self._lock = threading.Lock()

    @staticmethod
    def of(values: Tensor) -> Snapshot:
        """One that is made already."""
        made = Snapshot(values, values)
        made._source = None
        return made

    def take(self) -> Tensor:
        """The copy, made now unless it has been made."""
        with self._lock:
            if self._source is not None:
                self._out.copy_(self._source)
                self._source = None
            return self._out

    def settle(self) -> None:
        """The vector may change from here on."""
        self.take()


class DeviceSnapshot(Snapshot):
    """A fragment of a vector on a GPU: copied there at once, and brought to the host on a stream of its own.

    Neither holds the stepping thread up; whoever wants the host's copy waits for it.
    """

    def __init__(self, source: Tensor) -> None:
        self.near = source.clone()
        stream = _side_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        out = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            out.copy_(self.near, non_blocking=True)
        self.near.record_stream(stream)
        self._done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._done.record(stream)
        super().__init__(self.near, out)

    def take(self) -> Tensor:
        """The host's copy, once it is there."""
        self._done.synchronize()
        return self._out

    def settle(self) -> None:
        return


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def brought(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on another device, on their way there when this returns; on the host, they themselves."""
    if device.type == "cuda" and not values.is_cuda:
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
