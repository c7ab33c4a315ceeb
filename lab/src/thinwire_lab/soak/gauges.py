"""What processes hold: memory, descriptors, threads, files, shared memory, Spark's blocks."""

from __future__ import annotations

import os
import tempfile
from typing import Any

SHARED = "/dev/shm"
BLOCKS = "blockmgr-"
"""How Spark names the folder of a block manager."""


def of_process(pid: int) -> dict[str, float]:
    """Memory that is its own in MB, descriptors and threads; nothing where it is gone."""
    try:
        with open(f"/proc/{pid}/status") as found:
            lines = dict(line.split(":", 1) for line in found if ":" in line)
        return {
            "memory_mb": int(lines["RssAnon"].split()[0]) / 1e3,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(lines["Threads"]),
        }
    except (OSError, KeyError, ValueError):
        return {}


def of_machine(before: frozenset[str]) -> dict[str, float]:
    """Temporary files that there are now, and pieces of shared memory that were not there before."""
    return {"files": files(tempfile.gettempdir()), "shared": len(shared() - before)}


def shared() -> frozenset[str]:
    """Names in the folder for shared memory, but for what schedules keep there."""
    names = os.listdir(SHARED) if os.path.isdir(SHARED) else []
    return frozenset(name for name in names if not name.startswith("thinwire-schedule-"))


def files(folder: str) -> int:
    """Files and folders below a folder, but for what Spark keeps of executors that are gone: logs, and empty folders.

    Those of their block managers are cleared when the application ends, and count by the files that are in them.
    """
    count = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("work", "app-"))]
        count += len(names)
        if BLOCKS not in path:
            count += sum(not name.startswith(BLOCKS) for name in folders)
    return count


def of_spark(session: Any) -> dict[str, float]:
    """The driver's live heap, blocks on driver and executors in MB, files that broadcasts left, rows that are kept."""
    context = session.sparkContext
    jvm, scala = context._jvm, context._jsc.sc()
    jvm.System.gc()
    runtime = jvm.java.lang.Runtime.getRuntime()
    status = scala.getExecutorMemoryStatus().values().iterator()
    used = 0
    while status.hasNext():
        each = status.next()
        used += each._1() - each._2()
    return {
        "heap_mb": (runtime.totalMemory() - runtime.freeMemory()) / 1e6,
        "blocks_mb": used / 1e6,
        "broadcast_files": len(os.listdir(context._temp_dir)),
        "kept_rdds": len(scala.getRDDStorageInfo()),
    }
