"""Measures rounds on the first worker, and proposes settings that fit the link better."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from thinwire.engine.signals import Landed
from thinwire.parameters import Fragment
from thinwire.rules.period import Link, fit_link
from thinwire.strategies import Measured

if TYPE_CHECKING:
    from thinwire.engine.worker import Worker

SAMPLES = 24
"""Newest rounds of about one size that are remembered."""
DRIFT, JUDGED = 2.0, 6
"""So many rounds in a row that took so many times longer, or shorter, than before: it is another link now."""
UNUSUAL = 2.0
"""Times what most rounds of its size take, at which a round that took longer is counted."""
EVERY_ROUND_UNTIL, THEN_EVERY = 32, 17
"""Rounds looked at one by one while the run is young, and how often later: fragments take turns in being looked at."""


class Tuner:
    """One worker's measurements; only the first worker of a generation acts on its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._explained = self._drifted = False
        self.first = -1
        """The round that waits for whoever starts last: no measure of the link. Negative until one has landed."""
        self._taken: dict[Fragment, int] = {}
        """Steps at each fragment's last snapshot that landed."""
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        """Sizes and seconds of rounds, by the size's order of magnitude: two sizes tell latency and bandwidth apart."""

    def see(self, landed: Landed) -> None:
        """Notes a round's size and duration; the first worker logs some."""
        if self.first < 0:
            self.first = landed.round
        if landed.size_bytes and landed.round > self.first:
            self._remember(landed.size_bytes, landed.seconds)
        late, period = self._fresh(landed) if self._worker.lead else (None, None)
        if self._worker.lead and _looked_at(landed.round):
            cut = self._worker.joint.cuts.at(landed.round)
            setting = cut.setting
            self._worker.event(
                "round_landed",
                round=landed.round,
                steps=self._worker.meter.steps,
                fragments=setting.fragments,
                codec=setting.codec or self._worker.plan.codec,
                seconds=landed.seconds,
                size_bytes=landed.size_bytes,
                contributors=sorted(landed.notes),
                fragment=cut.number(landed.round),
                late=late,
                period=period,
            )

    def _fresh(self, landed: Landed) -> tuple[int | None, int | None]:
        """Steps since the landed fragment's snapshot, and between that and the one before."""
        taken = self._worker.shares.get(landed.fragment)
        if taken is None:
            return None, None
        before, self._taken[landed.fragment] = self._taken.get(landed.fragment), taken[0]
        return self._worker.meter.steps - taken[0], None if before is None else taken[0] - before

    def note(self, round: int) -> dict[str, Any]:
        """What to say in a round's note: a new setting, when the strategy sees from what was measured that one fits."""
        if not self._samples or not (_looked_at(round) or self._drifted) or self._worker.strategy.timing == "async":
            return {}
        self._drifted = False
        worker, link = self._worker, self._link()
        current = worker.joint.cuts.newest
        step_s = worker.meter.step_s or None
        size, handling_s = worker.joint.size, worker.meter.handling_s or None
        verdict = worker.guard.verdict
        measured = Measured(size, len(worker.members), round, link, step_s, handling_s, hurts=bool(verdict))
        chosen = worker.strategy.setting(measured, current.setting)
        since = round + worker.strategy.in_flight
        why = "; ".join(filter(None, (verdict, worker.strategy.explain(measured, chosen))))
        changes = chosen != current.setting and since > current.since
        if not changes and (self._explained or not why):
            return {}
        self._explained = self._explained or bool(why)
        setting = dataclasses.asdict(chosen)
        finite = link.bytes_per_s if link.bytes_per_s < 1e15 else None
        worker.event(
            "setting_changed",
            since=since if changes else current.since,
            setting=setting,
            latency_s=link.latency_s,
            bytes_per_s=finite,
            step_s=step_s,
            why=why,
        )
        return {"setting": setting, "since": since} if changes else {}

    def _remember(self, size_bytes: float, seconds: float) -> None:
        order = round(math.log2(size_bytes))
        mine = self._samples.setdefault(order, deque(maxlen=SAMPLES))
        newest, before = list(mine)[-JUDGED:], list(mine)[:-JUDGED]
        if len(before) >= JUDGED:
            usual = median(took for _, took in before)
            off = [took / max(1e-9, usual) for _, took in newest]
            if min(off) > DRIFT or max(off) < 1 / DRIFT:  # other sizes will have changed by as much
                self._drifted, factor = True, median(off)
                for other, kind in self._samples.items():
                    self._samples[other] = deque([(size, took * factor) for size, took in kind], maxlen=SAMPLES)
                mine = self._samples[order] = deque(newest, maxlen=SAMPLES)
        mine.append((size_bytes, seconds))

    def _link(self) -> Link:
        """A round that took much longer than most of its size met with something else: it counts as twice the usual."""
        samples = []
        for kind in self._samples.values():
            most = UNUSUAL * median_low(took for _, took in kind)
            samples += [(size, min(took, most)) for size, took in kind]
        return fit_link([size for size, _ in samples], [took for _, took in samples])


def _looked_at(round: int) -> bool:
    return round < EVERY_ROUND_UNTIL or round % THEN_EVERY == 0
