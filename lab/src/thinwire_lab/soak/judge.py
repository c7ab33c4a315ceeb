"""Results of a soak test: the share of speed that the run kept, and the growth of resources."""

from __future__ import annotations

import bisect
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

SETTLED = 0.2
"""Share of the time with deaths after which resources must not grow any more."""
ALLOWED = {"memory_mb": 24.0, "heap_mb": 24.0, "blocks_mb": 8.0}
"""Growth in MB that is allowed; for other resources this number:"""
ALLOWED_COUNT = 6.0
SUMMARY_KEYS = ("rows", "workers_lost", "generations", "rounds", "val_loss", "reason")


@dataclass
class Grown:
    """One resource, early and late."""

    early: float
    late: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.late - self.early <= self.allowed


@dataclass
class Soaked:
    """The result of a soak test."""

    minutes: float
    deaths: int
    goodput: float
    """Rows a second that count while workers are killed, relative to the time before."""
    complete: bool
    gauges: dict[str, Grown] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Violations."""
        grown = [
            f"{name} grew from {each.early:,.0f} to {each.late:,.0f}"
            for name, each in self.gauges.items()
            if not each.flat
        ]
        return grown + ([] if self.complete else [f"not all rows were trained on: {self.summary.get('reason')}"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"wrong": self.wrong}


def judge(found: dict[str, Any]) -> Soaked:
    """The result of the measurements of `run`."""
    order = found["order"]
    quiet, end = order["quiet_s"], order["quiet_s"] + 60.0 * order["minutes"]
    done = Done(found["rows"])
    before = (done.at(quiet) - done.at(quiet / 4)) / (quiet * 3 / 4) if quiet else 0.0
    during = (done.at(end) - done.at(quiet)) / (end - quiet)
    return Soaked(
        minutes=order["minutes"],
        deaths=len(found["deaths"]),
        goodput=round(during / before, 4) if before else 0.0,
        complete=bool(found["summary"]["complete"]),
        gauges=grown([look for look in found["looks"] if quiet <= look["at_s"] <= end]),
        summary={name: found["summary"][name] for name in SUMMARY_KEYS},
    )


def grown(looks: list[dict[str, Any]]) -> dict[str, Grown]:
    """The growth of each resource, from its median soon after the beginning to its median at the end.

    >>> [each.flat for each in grown([{"at_s": i, "deaths": i, "driver threads": 5 + i} for i in range(40)]).values()]
    [False]
    """
    if len(looks) < 5:
        return {}
    part = max(2, int(len(looks) * SETTLED))
    names = sorted({name for look in looks for name in look} - {"at_s", "deaths"})
    found = {}
    for name in names:
        early = [look[name] for look in looks[part // 2 : part // 2 + part] if name in look]
        late = [look[name] for look in looks[-part:] if name in look]
        if early and late:
            allowed = ALLOWED.get(name.rpartition(" ")[2], ALLOWED_COUNT)
            found[name] = Grown(round(statistics.median(early), 2), round(statistics.median(late), 2), allowed)
    return found


class Done:
    """Rows that count, by time: each worker's last report, without rows that a death has undone.

    >>> Done([(0.0, 0, 0), (10.0, 0, 100), (0.0, 1, 0), (10.0, 1, 50)]).at(5.0)
    75.0
    """

    def __init__(self, told: list[Any]) -> None:
        self._times: dict[int, list[float]] = {}
        self._rows: dict[int, list[int]] = {}
        for at_s, worker, rows in told:
            self._times.setdefault(worker, []).append(at_s)
            self._rows.setdefault(worker, []).append(rows)

    def at(self, seconds: float) -> float:
        """Rows at a time, interpolated between reports."""
        total = 0.0
        for worker, times in self._times.items():
            rows, i = self._rows[worker], bisect.bisect_right(times, seconds)
            if i == 0 or i == len(times):
                total += rows[max(0, i - 1)]
                continue
            share = (seconds - times[i - 1]) / max(1e-9, times[i] - times[i - 1])
            total += rows[i - 1] + share * (rows[i] - rows[i - 1])
        return total
