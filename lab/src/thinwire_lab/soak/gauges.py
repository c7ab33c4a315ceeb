"""Resources of processes: memory, descriptors, threads, files, shared memory, Spark's blocks."""

from __future__ import annotations

import os
import tempfile
from typing import Any

SHARED = "/dev/shm"
BLOCKS = "blockmgr-"
"""Prefix of the folders of Spark's block managers."""


def of_process(pid: int) -> dict[str, float]:
    """Private memory in MB, descriptors and threads of a process; empty if it has ended."""
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
    """Number of temporary files, and of shared memory segments that are not in `before`."""
    return {"files": files(tempfile.gettempdir()), "shared": len(shared() - before)}


def shared() -> frozenset[str]:
    """Names of shared memory segments, except folders of schedules."""
    names = os.listdir(SHARED) if os.path.isdir(SHARED) else []
    return frozenset(name for name in names if not name.startswith("thinwire-schedule-"))


def files(folder: str) -> int:
    """Counts files and folders below a folder, except logs and empty folders that Spark keeps of lost executors.

    Folders of block managers are removed when the application ends; only the files in them count.
    """
    count = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("work", "app-"))]
        count += len(names)
        if BLOCKS not in path:
            count += sum(not name.startswith(BLOCKS) for name in folders)
    return count


def of_spark(session: Any) -> dict[str, float]:
    """The driver's live heap and all blocks in MB, files left by broadcasts, and persisted RDDs."""
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
