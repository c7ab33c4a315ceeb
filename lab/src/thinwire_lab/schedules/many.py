"""Runs many schedules on all processors: counts outcomes, and gives the commands to run failed ones again."""

from __future__ import annotations

import collections
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire_lab.schedules.draw import Schedule
from thinwire_lab.schedules.play import Verdict, play

MOST_SHOWN = 20
SLICE = 20
"""Schedules that a process gets at once."""


@dataclass
class Tally:
    """The results of schedules."""

    played: int = 0
    seconds: float = 0.0
    """Seconds of real time."""
    virtual_s: float = 0.0
    lost: int = 0
    """Lost workers in all schedules."""
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    strategies: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[Verdict] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """By seed, the digest of its events."""

    def add(self, verdict: Verdict) -> None:
        self.played += 1
        self.virtual_s += verdict.seconds
        self.lost += verdict.lost
        self.outcomes[verdict.what if verdict.ok else "failed"] += 1
        self.strategies[verdict.name] += 1
        self.digests[verdict.seed] = verdict.digest
        if not verdict.ok:
            self.failed.append(verdict)

    def to_json(self) -> dict[str, Any]:
        """The tally as plain values."""
        return {
            "played": self.played,
            "seconds": round(self.seconds, 1),
            "virtual_s": round(self.virtual_s, 1),
            "workers_lost": self.lost,
            "outcomes": dict(self.outcomes),
            "strategies": dict(sorted(self.strategies.items())),
            "failed": [{"seed": v.seed, "name": v.name, "what": v.what, "replay": v.replay} for v in self.failed],
        }


def play_all(seeds: range, jobs: int, only: str | None = None, told: Callable[[Tally], None] = lambda t: None) -> Tally:
    """Runs the schedules of these seeds in a number of processes."""
    tally, began = Tally(), time.monotonic()
    for verdict in _verdicts(seeds, jobs, only):
        tally.add(verdict)
        tally.seconds = time.monotonic() - began
        told(tally)
    tally.failed.sort(key=lambda verdict: verdict.seed)
    return tally


def _verdicts(seeds: range, jobs: int, only: str | None) -> Iterator[Verdict]:
    tasks = [(seed, only) for seed in seeds]
    if jobs == 1:
        yield from map(_play, tasks)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Pool(jobs, _settle, (context.Array("i", jobs),), maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(_play, tasks, chunksize=SLICE)


def _settle(places: Any) -> None:
    """Pins this process to one core: one of its threads runs at a time, and waking it on another core takes longer."""
    with places.get_lock():
        place = next((index for index, pid in enumerate(places) if not pid or not _lives(pid)), 0)
        places[place] = os.getpid()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place % len(cores)]})


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _play(task: tuple[int, str | None]) -> Verdict:
    seed, only = task
    return play(Schedule.draw(seed, only))
