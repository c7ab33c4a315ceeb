"""Trial after bout, over strategies and places, until the time is up or enough has been killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ConfigError
from thinwire.recipe import shipped
from thinwire.strategies import STRATEGIES
from thinwire_lab.chaos.host import Host
from thinwire_lab.chaos.trial import Report, Trial

WORKERS = 4
EPOCHS = {"local": 60, "spark": 40, "bed": 40, "host": 60}
"""By place: a bout of so many deeds takes half a minute where nothing is done to it."""
EVERY_S = {"local": 1.5, "spark": 6.0, "bed": 6.0, "host": 3.0}
"""Between two deeds, on average: a replacement takes about as long to be there."""
DEEDS = 12
"""In one bout, unless said; the rest of it is to end in peace."""
PLACEMENTS = ("whole", "planned", "tensor_parallel", "pipeline")
"""Kinds of placement; with all but the first a replica spans a group of workers."""
GROUPED, GROUP_SIZE = 0.4, 2
"""Share of bouts with groups where no placements are given, and the workers of a group."""
SETTINGS = ("run.checkpoint_every=20", f"cluster.workers={WORKERS}", "train.optimizer.lr=0.01")


@dataclass(frozen=True)
class Campaign:
    """What is to be played.

    Args:
        seed: of the first bout; each has the next.
        arenas: "local", "spark" (a local-cluster of executors), "bed" (Spark on an emulated network, as root) and
            "host" (processes on a disk and under a clock of their own, as root).
        strategies: by name, in turn.
        minutes: after which no bout begins.
        kills: after which none does; no limit unless given.
        out: a folder for the runs and the report.
        deeds: in one bout.
        placements: kinds of placement, each as often; where none is given, `GROUPED` of all bouts have groups.
        about: what the report says of itself, such as date and machine.
    """

    seed: int
    arenas: tuple[str, ...]
    strategies: tuple[str, ...]
    minutes: float
    out: str
    kills: int | None = None
    deeds: int = DEEDS
    placements: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    def play(self, told: Callable[[Report], None] = lambda report: None) -> list[Report]:
        """Plays it, after what is in `out` already; the report is written after every bout."""
        until = time.monotonic() + 60.0 * self.minutes
        self.reports.extend(earlier(self.out))
        begin = len(self.reports)
        for number, (strategy, arena) in enumerate(itertools.islice(self._turns(), begin, None), begin):
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

    def _killed_in(self, arena: str) -> int:
        return sum(report.kills for report in self.reports if report.arena == arena)

    def totals(self) -> dict[str, Any]:
        """What all came to."""
        return {
            "bouts": len(self.reports),
            "deeds": sum(len(report.deeds) for report in self.reports),
            "kills": self.killed,
            **{f"kills_{arena}": self._killed_in(arena) for arena in sorted({each.arena for each in self.reports})},
            "kills_in_groups": sum(report.kills for report in self.reports if report.placement != PLACEMENTS[0]),
            "workers_lost": sum(report.lost for report in self.reports),
            "resumed": sum(report.resumed for report in self.reports),
            "generations": sum(report.generations for report in self.reports),
            "longest_gap_s": max((report.longest_gap_s for report in self.reports), default=0.0),
            "wrong": sum(bool(report.wrong) for report in self.reports),
        }

    def _turns(self) -> Iterator[tuple[str, str]]:
        return itertools.cycle([(strategy, arena) for strategy in self.strategies for arena in self.arenas])

    def _bout(self, arena: str, strategy: str, seed: int) -> Report:
        placement = placement_of(seed, self.placements)
        named = strategy if placement == PLACEMENTS[0] else f"{strategy}-{placement}"
        out = os.path.join(self.out, f"{seed:04d}-{arena}-{named}")
        while os.path.exists(out) or os.path.exists(f"{out}.log"):  # of a bout that was not played to its end
            out += "-again"
        settings = [*SETTINGS, f"strategy.name={strategy}", f"train.epochs={EPOCHS[arena] * self.deeds // DEEDS}"]
        settings += ["cluster.max_restarts=1000"] if arena in ("local", "host") else ["cluster.kind=spark"]
        if placement != PLACEMENTS[0]:
            settings += [f"placement.kind={placement}", f"placement.group_size={GROUP_SIZE}"]
        with contextlib.ExitStack() as stack:
            bed = host = None
            folder, log = out, f"{out}.log"
            if arena == "host":
                os.makedirs(out, exist_ok=True)
                host = stack.enter_context(Host(out))
                folder = os.path.join(host.disk, "run")
            elif arena == "spark":
                settings.append(f"cluster.master=local-cluster[{WORKERS},1,1024]")
            elif arena == "bed":
                from thinwire_lab.sparkbed import SparkBed

                bed = stack.enter_context(SparkBed(WORKERS, "1gbit"))
                settings.append(f"cluster.master={bed.master}")
            words = [word for setting in settings for word in ("--set", setting)]
            places: dict[str, Any] = {"out": folder, "log": log, "bed": bed, "host": host}
            recipe = shipped()["digits"]
            bout = Trial(arena, strategy, seed, recipe=recipe, settings=words, placement=placement, **places)
            report = bout.play(every_s=EVERY_S[arena], most=self.deeds)
            if folder != out and report.wrong and os.path.isdir(folder):  # the disk goes
                shutil.copytree(folder, os.path.join(out, "run"))
            return report

    def _write(self) -> None:
        path = os.path.join(self.out, "chaos.json")
        with open(f"{path}.tmp", "w") as file:
            found = {"totals": self.totals(), "bouts": [report.to_json() for report in self.reports]}
            json.dump({"name": "chaos", **self.about, **found}, file, indent=1)
        os.replace(f"{path}.tmp", path)


def earlier(out: str) -> list[Report]:
    """The bouts of a season that wrote its report there, to be gone on with.

    Raises:
        ConfigError: What is there is no such report.
    """
    path = os.path.join(out, "chaos.json")
    if not os.path.exists(path):
        return []
    try:
        with open(path) as file:
            return [Report(**told) for told in json.load(file)["bouts"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is no report of a season ({error!r}); give another --out, or remove it") from error


def placement_of(seed: int, among: tuple[str, ...] = ()) -> str:
    """The placement of a bout: of these, or of all there are.

    >>> placement_of(3, ("planned",)), placement_of(3) == placement_of(3)
    ('planned', True)
    """
    chance = random.Random(f"placement {seed}")
    if among:
        return chance.choice(among)
    return chance.choice(PLACEMENTS[1:]) if chance.random() < GROUPED else PLACEMENTS[0]


def known_strategies() -> tuple[str, ...]:
    """All there are: each gets its turn."""
    return tuple(sorted(STRATEGIES))
