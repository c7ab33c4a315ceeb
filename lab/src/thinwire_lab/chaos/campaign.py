"""A campaign of trials over strategies and arenas, until the time is up or the number of kills is reached."""

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
"""By arena: with these epochs a trial of `FAULTS` faults takes half a minute without any fault."""
EVERY_S = {"local": 1.5, "spark": 6.0, "bed": 6.0, "host": 3.0}
"""Mean seconds between two faults; a replacement takes about as long to join."""
FAULTS = 12
"""Default number of faults in a trial; the rest of the trial runs without faults."""
PLACEMENTS = ("whole", "planned", "tensor_parallel", "pipeline")
"""Kinds of placement; in all but the first, a replica spans a group of workers."""
GROUPED, GROUP_SIZE = 0.4, 2
"""Share of trials with groups if no placements are given, and the workers of a group."""
SETTINGS = ("run.checkpoint_every=20", f"cluster.workers={WORKERS}", "train.optimizer.lr=0.01")


@dataclass(frozen=True)
class Campaign:
    """The settings and the reports of a campaign.

    Args:
        seed: seed of the first trial; each further trial has the next seed.
        arenas: "local", "spark" (a local-cluster of executors), "bed" (Spark on an emulated network; needs root) and
            "host" (processes with a disk and a clock of their own; needs root).
        strategies: names of strategies, in turn.
        minutes: after this time no trial begins.
        kills: after this number of kills no trial begins; by default there is no limit.
        out: folder for the runs and the report.
        deeds: number of faults in a trial.
        placements: kinds of placement, equally often; if none is given, `GROUPED` of all trials have groups.
        about: information for the report, such as date and machine.
    """

    seed: int
    arenas: tuple[str, ...]
    strategies: tuple[str, ...]
    minutes: float
    out: str
    kills: int | None = None
    deeds: int = FAULTS
    placements: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    def play(self, told: Callable[[Report], None] = lambda report: None) -> list[Report]:
        """Runs trials, after those already in `out`; writes the report after each."""
        until = time.monotonic() + 60.0 * self.minutes
        self.reports.extend(earlier(self.out))
        begin = len(self.reports)
        for number, (strategy, arena) in enumerate(itertools.islice(self._turns(), begin, None), begin):
            if time.monotonic() >= until or (self.kills is not None and self.killed >= self.kills):
                break
            report = self._run_trial(arena, strategy, self.seed + number)
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
        """Totals over all trials."""
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

    def _run_trial(self, arena: str, strategy: str, seed: int) -> Report:
        placement = placement_of(seed, self.placements)
        named = strategy if placement == PLACEMENTS[0] else f"{strategy}-{placement}"
        out = os.path.join(self.out, f"{seed:04d}-{arena}-{named}")
        while os.path.exists(out) or os.path.exists(f"{out}.log"):  # left by a trial that did not end
            out += "-again"
        settings = [*SETTINGS, f"strategy.name={strategy}", f"train.epochs={EPOCHS[arena] * self.deeds // FAULTS}"]
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
            trial = Trial(arena, strategy, seed, recipe=recipe, settings=words, placement=placement, **places)
            report = trial.play(every_s=EVERY_S[arena], most=self.deeds)
            if folder != out and report.wrong and os.path.isdir(folder):  # the disk will be removed
                shutil.copytree(folder, os.path.join(out, "run"))
            return report

    def _write(self) -> None:
        path = os.path.join(self.out, "chaos.json")
        with open(f"{path}.tmp", "w") as file:
            found = {"totals": self.totals(), "bouts": [report.to_json() for report in self.reports]}
            json.dump({"name": "chaos", **self.about, **found}, file, indent=1)
        os.replace(f"{path}.tmp", path)


def earlier(out: str) -> list[Report]:
    """The trials of a campaign whose report is in a folder, which is continued.

    Raises:
        ConfigError: The file is not a report of a campaign.
    """
    path = os.path.join(out, "chaos.json")
    if not os.path.exists(path):
        return []
    try:
        with open(path) as file:
            return [Report(**told) for told in json.load(file)["bouts"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the report of a campaign ({error!r}); give another --out, or remove it"
        ) from error


def placement_of(seed: int, among: tuple[str, ...] = ()) -> str:
    """The placement of a trial: one of `among`, or else one of all kinds.

    >>> placement_of(3, ("planned",)), placement_of(3) == placement_of(3)
    ('planned', True)
    """
    chance = random.Random(f"placement {seed}")
    if among:
        return chance.choice(among)
    return chance.choice(PLACEMENTS[1:]) if chance.random() < GROUPED else PLACEMENTS[0]


def known_strategies() -> tuple[str, ...]:
    """All strategies, in turn."""
    return tuple(sorted(STRATEGIES))
