"""What a local worker process runs: `python -m thinwire.cluster.child WORKER ATTEMPT THREADS`, its code on stdin."""

from __future__ import annotations

import os
import sys
import threading

import cloudpickle


def _leave_with_the_driver() -> None:
    """The driver holds the other end of stdin for as long as it lives."""
    sys.stdin.buffer.read(1)
    os._exit(3)


def main() -> None:
    """Reads the entry from the pipe and runs it."""
    worker, attempt, threads = (int(word) for word in sys.argv[1:4])
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    payload = sys.stdin.buffer.read(size)
    threading.Thread(target=_leave_with_the_driver, daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    entry = cloudpickle.loads(payload)  # from the driver's own pipe, never from the network
    entry(worker, attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # daemon threads and user libraries must not hold up the end


if __name__ == "__main__":
    main()
