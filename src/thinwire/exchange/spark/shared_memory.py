"""A long payload in memory that processes of one machine hand to each other without copying it."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

SHORT_BYTES = 64 << 10
"""Up to here bytes simply travel through the socket."""
POSSIBLE = hasattr(os, "memfd_create")


class SharedMemory:
    """Bytes behind a descriptor; whoever gets the descriptor maps the same memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    @classmethod
    def of(cls, data: Any) -> SharedMemory | bytes:
        """A copy of some bytes; as bytes where they are few, or where the system has no memory without a name."""
        view = memoryview(data).cast("B")
        if not POSSIBLE or view.nbytes <= SHORT_BYTES:
            return bytes(view)
        found = cls(os.memfd_create("thinwire"), view.nbytes)
        left = view
        while left.nbytes:
            left = left[os.write(found.descriptor, left) :]
        return found

    @classmethod
    def received(cls, descriptor: int, size: int) -> SharedMemory:
        """Another process's, if it is as long as was said."""
        found = cls(descriptor, size)
        if os.fstat(descriptor).st_size != size or not size:
            raise ValueError(f"a sheet of {os.fstat(descriptor).st_size} bytes where {size} were announced")
        return found

    def read(self) -> memoryview:
        """Its bytes: writable, and nobody else sees what is written."""
        return memoryview(mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()
