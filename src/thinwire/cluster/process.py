"""Settings of a process that runs one worker."""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
TOP_PAD = 16 << 20


def make_own(threads: int) -> None:
    """Sets torch's threads, and makes the process keep the memory that it frees.

    Every step frees its activations and allocates as many again. By default glibc returns some of this memory to the
    kernel between steps, and up to a tenth of a step's time goes into getting it back page by page.
    """
    import torch

    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):  # another libc, which lacks mallopt
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, TOP_PAD)
