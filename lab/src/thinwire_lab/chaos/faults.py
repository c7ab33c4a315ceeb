"""Faults in processes and links, and how each is undone. Affects only processes that the run has started."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EXECUTOR = "CoarseGrainedExecutorBackend"
LOW_BYTES = 1 << 20
"""Memory that a worker with a limit may still allocate."""
SLOW_BYTES = 64 << 10
"""Bytes a second of a slow disk."""


@dataclass
class Target:
    """A run in progress: its driver's process, and its workers' processes from its events."""

    driver: int
    workers: dict[int, int] = field(default_factory=dict)
    """Process IDs by worker; helpers beside the driver count as workers without rows."""
    bed: Any = None
    """The emulated network, if there is one."""
    host: Any = None
    """The trial's own disk and clock, if it has them."""
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def later(self, seconds: float, act: Callable[[], Any]) -> None:
        """Undoes a fault after a while, or at the end of the trial if that is earlier."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self.undo += [timer.cancel, act]
        timer.start()


Fault = Callable[[Target, random.Random], str]
"""Injects a fault; returns its description for the report, or an empty text if there was no target."""


def kill_worker(target: Target, chance: random.Random) -> str:
    """`kill -9` of a worker's process."""
    worker = _one(target, chance)
    return "" if worker is None or not _signal(target.workers[worker], signal.SIGKILL) else f"kill -9 worker {worker}"


def kill_executor(target: Target, chance: random.Random) -> str:
    """`kill -9` of the JVM of a worker's executor."""
    worker = _one(target, chance)
    executor = None if worker is None else executor_of(target.workers[worker])
    if executor is None or not _signal(executor, signal.SIGKILL):
        return ""
    return f"kill -9 the executor of worker {worker}"


def pause_worker(target: Target, chance: random.Random) -> str:
    """SIGSTOP, either briefly or for long enough that the worker is given up."""
    worker, seconds = _one(target, chance), chance.choice((0.5, 2.0, 6.0, 20.0))
    if worker is None or not _signal(target.workers[worker], signal.SIGSTOP):
        return ""
    pid = target.workers[worker]
    target.later(seconds, lambda: _signal(pid, signal.SIGCONT))
    return f"SIGSTOP worker {worker} for {seconds:g} s"


def kill_driver(target: Target, chance: random.Random) -> str:
    """`kill -9` of the driver: the run ends, and is resumed from its last checkpoint."""
    return "kill -9 the driver" if _signal(target.driver, signal.SIGKILL) else ""


def starve_worker(target: Target, chance: random.Random) -> str:
    """Limits a worker's memory to a little more than it has: its next large allocation fails."""
    worker = _one(target, chance)
    if worker is None:
        return ""
    try:
        with open(f"/proc/{target.workers[worker]}/statm") as found:
            limit = int(found.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + LOW_BYTES
        resource.prlimit(target.workers[worker], resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):
        return ""
    return f"limit worker {worker} to {limit >> 20} MiB"


def cut_node(target: Target, chance: random.Random) -> str:
    """Disconnects a node for a while."""
    node, seconds = chance.randrange(1, target.bed.nodes + 1), chance.choice((1.0, 5.0, 20.0))
    target.bed.bed.cut(node)
    target.later(seconds, lambda: target.bed.bed.heal(node))
    return f"cut node {node} for {seconds:g} s"


def throttle_node(target: Target, chance: random.Random) -> str:
    """Slows a node's link for a while."""
    node, rate, seconds = chance.randrange(1, target.bed.nodes + 1), chance.choice(("1mbit", "10mbit")), 10.0
    target.bed.bed.throttle(node, rate)
    target.later(seconds, lambda: target.bed.bed.throttle(node, "1gbit"))
    return f"throttle node {node} to {rate} for {seconds:g} s"


def fill_disk(target: Target, chance: random.Random) -> str:
    """Fills the disk to which the run writes for a while."""
    seconds = chance.choice((2.0, 6.0, 15.0))
    target.host.fill()
    target.later(seconds, target.host.free)
    return f"fill the disk for {seconds:g} s"


def slow_disk(target: Target, chance: random.Random) -> str:
    """Slows the disk to a few pages a second for a while."""
    seconds = chance.choice((5.0, 15.0))
    if not target.host.throttles:
        return ""
    target.host.slow(SLOW_BYTES, [target.driver, *target.workers.values()])
    target.later(seconds, lambda: target.host.slow(0, []))
    return f"slow the disk to {SLOW_BYTES >> 10} KiB/s for {seconds:g} s"


def jump_clock(target: Target, chance: random.Random) -> str:
    """Changes the time of day for driver and workers."""
    offset_s = chance.choice((-86_400, -3_600, -7, 7, 3_600, 86_400))
    if not target.host.has_clock:
        return ""
    target.host.set_clock(offset_s)
    return f"jump the clock to {offset_s:+,} s"


LOCAL: tuple[tuple[Fault, int], ...] = ((kill_worker, 12), (pause_worker, 3), (kill_driver, 1))
SPARK: tuple[tuple[Fault, int], ...] = ((kill_worker, 5), (kill_executor, 5), (pause_worker, 2), (kill_driver, 1))
BED: tuple[tuple[Fault, int], ...] = ((kill_worker, 3), (kill_executor, 3), (cut_node, 3), (throttle_node, 2))
HOST: tuple[tuple[Fault, int], ...] = (
    (kill_worker, 3),
    (fill_disk, 3),
    (slow_disk, 2),
    (jump_clock, 3),
    (starve_worker, 2),
)
ARENAS: dict[str, tuple[tuple[Fault, int], ...]] = {"local": LOCAL, "spark": SPARK, "bed": BED, "host": HOST}
"""By arena, the possible faults with their relative frequencies."""


def draw(arena: str, chance: random.Random) -> Fault:
    """Draws the next fault."""
    faults = ARENAS[arena]
    return chance.choices([fault for fault, _ in faults], [weight for _, weight in faults])[0]


def executor_of(pid: int) -> int | None:
    """The executor's JVM above a worker's process; None where there is none."""
    for _ in range(8):
        try:
            with open(f"/proc/{pid}/cmdline") as found:
                if EXECUTOR in found.read():
                    return pid
            with open(f"/proc/{pid}/stat") as found:
                pid = int(found.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


def _one(target: Target, chance: random.Random) -> int | None:
    here = sorted(worker for worker, pid in target.workers.items() if os.path.exists(f"/proc/{pid}"))
    return chance.choice(here) if here else None


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return True
    return False
