"""Measures rounds on the first worker, and proposes settings that fit the link better."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from thinwire.engine.signals import Landed
from thinwire.rules.period import Link, fit_link
from thinwire.strategies import Measured

if TYPE_CHECKING:
    from thinwire.engine.worker import Worker

SAMPLES = 64
EVERY_ROUND_UNTIL, THEN_EVERY = 32, 16
"""Rounds looked at one by one while the run is young, and how often later."""


class Tuner:
    """One worker's measurements; only the first worker of a generation acts on its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._samples: list[tuple[float, float]] = []

    def see(self, landed: Landed) -> None:
        """Notes a round's size and duration; the first worker logs some."""
        if landed.size_bytes:
            self._samples = [*self._samples[-SAMPLES + 1 :], (landed.size_bytes, landed.seconds)]
        if self._worker.lead and _looked_at(landed.round):
            setting = self._worker.joint.cuts.at(landed.round).setting
            self._worker.event(
                "round_landed",
                round=landed.round,
                steps=self._worker.meter.steps,
                fragments=setting.fragments,
                codec=setting.codec or self._worker.plan.codec,
                seconds=landed.seconds,
                size_bytes=landed.size_bytes,
                contributors=sorted(landed.notes),
            )

    def note(self, round: int) -> dict[str, Any]:
        """What to say in a round's note: a new setting, when the strategy sees from what was measured that one fits."""
        if not self._samples or not _looked_at(round) or self._worker.strategy.timing == "async":
            return {}
        worker, link = self._worker, self._link()
        current = worker.joint.cuts.newest
        step_s = worker.meter.step_s or None
        size, handling_s = worker.joint.size, worker.meter.handling_s or None
        measured = Measured(size, len(worker.members), round, link, step_s, handling_s)
        chosen = worker.strategy.setting(measured, current.setting)
        since = round + worker.strategy.in_flight
        if chosen == current.setting or since <= current.since:
            return {}
        setting = dataclasses.asdict(chosen)
        finite = link.bytes_per_s if link.bytes_per_s < 1e15 else None
        worker.event(
            "setting_changed",
            since=since,
            setting=setting,
            latency_s=link.latency_s,
            bytes_per_s=finite,
            step_s=step_s,
        )
        return {"setting": setting, "since": since}

    def _link(self) -> Link:
        return fit_link([size for size, _ in self._samples], [seconds for _, seconds in self._samples])


def _looked_at(round: int) -> bool:
    return round < EVERY_ROUND_UNTIL or round % THEN_EVERY == 0
