"""Bout after bout, over strategies and places, until the time is up or enough has been killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire.recipe import shipped
from thinwire.strategies import STRATEGIES
from thinwire.testing.chaos.bout import Bout, Report

WORKERS = 4
EPOCHS = {"local": 60, "spark": 40, "bed": 40}
"""By place: a bout takes half a minute where nothing is done to it."""
EVERY_S = {"local": 1.5, "spark": 4.0, "bed": 6.0}
"""Between two deeds, on average: a replacement takes about as long to be there."""
MOST_DEEDS = 12
"""In one bout; the rest of it is to end in peace."""
SETTINGS = ("run.checkpoint_every=20", f"cluster.workers={WORKERS}", "train.optimizer.lr=0.01")


@dataclass(frozen=True)
class Season:
    """What is to be played.

    Args:
        seed: of the first bout; each has the next.
        arenas: "local", "spark" (a local-cluster of executors) and "bed" (Spark on an emulated network, as root).
        strategies: by name, in turn.
        minutes: after which no bout begins.
        kills: after which none does; no limit unless given.
        out: a folder for the runs and the report.
    """

    seed: int
    arenas: tuple[str, ...]
    strategies: tuple[str, ...]
    minutes: float
    out: str
    kills: int | None = None
    reports: list[Report] = field(default_factory=list)

    def play(self, told: Callable[[Report], None] = lambda report: None) -> list[Report]:
        """Plays it; the report is written after every bout."""
        until = time.monotonic() + 60.0 * self.minutes
        for number, (strategy, arena) in enumerate(self._turns()):
            if time.monotonic() >= until or (self.kills is not None and self.killed >= self.kills):
                break
            report = self._bout(arena, strategy, self.seed + number)
            self.reports.append(report)
            self._write()
            told(report)
        return self.reports

    @property
    def killed(self) -> int:
        return sum(report.kills for report in self.reports)

    def totals(self) -> dict[str, Any]:
        """What all came to."""
        return {
            "bouts": len(self.reports),
            "deeds": sum(len(report.deeds) for report in self.reports),
            "kills": self.killed,
            "workers_lost": sum(report.lost for report in self.reports),
            "resumed": sum(report.resumed for report in self.reports),
            "generations": sum(report.generations for report in self.reports),
            "longest_gap_s": max((report.longest_gap_s for report in self.reports), default=0.0),
            "wrong": sum(bool(report.wrong) for report in self.reports),
        }

    def _turns(self) -> Iterator[tuple[str, str]]:
        return itertools.cycle([(strategy, arena) for strategy in self.strategies for arena in self.arenas])

    def _bout(self, arena: str, strategy: str, seed: int) -> Report:
        out = os.path.join(self.out, f"{seed:04d}-{arena}-{strategy}")
        settings = [*SETTINGS, f"strategy.name={strategy}", f"train.epochs={EPOCHS[arena]}"]
        settings += ["cluster.max_restarts=1000"] if arena == "local" else ["cluster.kind=spark"]
        with contextlib.ExitStack() as stack:
            bed = None
            if arena == "spark":
                settings.append(f"cluster.master=local-cluster[{WORKERS},1,1024]")
            elif arena == "bed":
                from thinwire.testing.sparkbed import SparkBed

                bed = stack.enter_context(SparkBed(WORKERS, "1gbit"))
                settings.append(f"cluster.master={bed.master}")
            words = [word for setting in settings for word in ("--set", setting)]
            bout = Bout(arena, strategy, seed, recipe=shipped()["digits"], out=out, settings=words, bed=bed)
            return bout.play(every_s=EVERY_S[arena], most=MOST_DEEDS)

    def _write(self) -> None:
        path = os.path.join(self.out, "chaos.json")
        with open(f"{path}.tmp", "w") as file:
            json.dump({"totals": self.totals(), "bouts": [report.to_json() for report in self.reports]}, file, indent=1)
        os.replace(f"{path}.tmp", path)


def known_strategies() -> tuple[str, ...]:
    """All there are: each gets its turn."""
    return tuple(sorted(STRATEGIES))
