"""Measures rounds on the first worker, and proposes settings that fit the link better.

What the wire carries comes from the sockets where they count (`thinwire.worker.wire_meter`); the rest of a round's time
says nothing of how to pack. A setting is held then until a link half as fast again, and one as much slower, would
change it too. Where nobody counts, under Spark's jobs, latency and rate are told apart by rounds of two sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from statistics import median, median_low
from typing import Any, NamedTuple, final

from thinwire.exchange.ports import ReportsPort
from thinwire.exchange.signals import Landed
from thinwire.parameters import Fragment
from thinwire.rules.compression import codec
from thinwire.rules.period import Link, fit_link
from thinwire.strategies import Measured, Setting
from thinwire.strategies.base import follows_run
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.reports import Reports
from thinwire.worker.wire_meter import WireMeter

SAMPLES = 24
"""Newest rounds of about one size that are remembered."""
DRIFT, JUDGED = 2.0, 6
"""So many rounds in a row that took so many times longer, or shorter, than before: it is another link now."""
LOOK_AGAIN, LOOK_ROUNDS = 32, 4
"""The round at which the link is looked at with another size again, and for how many."""
ALIKE = 1.5
"""Times the fragments, up to which it is about the same setting."""
LATER, CONFIRMED = 2, 6
"""How many times later it is looked at next; and that where the setting of before was found to be right."""
UNUSUAL = 2.0
"""Times what most rounds of its size take, at which a round that took longer is counted."""
CERTAIN = 1.5
"""Times faster and slower that a link may be than it seems, under all of which a change must be right."""
SLOW_S = 0.02
"""Rounds that take longer are all looked at: that costs a thousandth of one."""
EVERY_ROUND_UNTIL, THEN_EVERY = 32, 17
"""Rounds looked at one by one while the run is young, and how often later: fragments take turns in being looked at."""


class Sample(NamedTuple):
    """One round."""

    round: int
    size_bytes: float
    seconds: float


@final
class Tuner:
    """One worker's measurements; only the first worker of a generation acts on its own."""

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        exchange: ReportsPort,
        reports: Reports,
        verdict: Callable[[], str],
        batches_per_epoch: int,
    ) -> None:
        self._plan, self._local, self._generation, self._exchange = plan, local, generation, exchange
        self._reports, self._verdict, self._batches_per_epoch = reports, verdict, batches_per_epoch
        self._strategy, self._joint, self._meter = local.strategy, local.joint, local.meter
        self._explained = self._drifted = False
        self.first = -1
        """The round that waits for whoever starts last: no measure of the link. Negative until one has landed."""
        self._look_again, self._looks_until = LOOK_AGAIN, 0
        """When another size is tried next; and until when one is being tried."""
        self._usual = Setting()
        """That of before."""
        self._taken: dict[Fragment, int] = {}
        """Steps at each fragment's last snapshot that landed."""
        self._samples: dict[int, deque[Sample]] = {}
        """By the size's order of magnitude: two sizes tell latency and bandwidth apart."""
        self._wire = WireMeter()
        self._newest_s = 0.0
        self._changed_at = 0, math.inf
        """The round of the last change, and what the wire was thought to carry then."""

    @property
    def bytes_per_s(self) -> float | None:
        """What the wire is thought to carry in a second; infinity where it is no limit, None while it is not known."""
        return self._wire.bytes_per_s

    def see(self, landed: Landed) -> None:
        """Notes a round's size and duration; the first worker logs some."""
        if self.first < 0:
            self.first = landed.round
        self._newest_s = landed.seconds
        if landed.size_bytes and landed.round > self.first:
            self._remember(Sample(landed.round, landed.size_bytes, landed.seconds))
        late, period = self._fresh(landed) if self._generation.lead else (None, None)
        if self._generation.lead and _looked_at(landed.round):
            cut = self._joint.cuts.at(landed.round)
            setting = cut.setting
            self._reports.event(
                "round_landed",
                round=landed.round,
                steps=self._meter.steps,
                fragments=setting.fragments,
                codec=setting.codec or self._plan.codec,
                seconds=landed.seconds,
                size_bytes=landed.size_bytes,
                contributors=sorted(landed.notes),
                fragment=cut.number(landed.round),
                late=late,
                period=period,
            )

    def _fresh(self, landed: Landed) -> tuple[int | None, int | None]:
        """Steps since the landed fragment's snapshot, and between that and the one before."""
        taken = self._local.shares.steps_at(landed.fragment)
        if taken is None:
            return None, None
        before, self._taken[landed.fragment] = self._taken.get(landed.fragment), taken
        return self._meter.steps - taken, None if before is None else taken - before

    def note(self, round: int) -> dict[str, Any]:
        """What to say in a round's note: a new setting, when the strategy sees from what was measured that one fits.

        Where sockets count, the setting in force stays until they are certain. Elsewhere rounds of one size do not
        tell what is latency and what are bytes, and what another size took long ago was perhaps taken while machines
        were busy with starting: the link is looked at again, with a new pair of sizes, ever more seldom; and at once
        when rounds take much longer or shorter than before.
        """
        if self._strategy.timing == "async":
            return {}
        if looked := _looked_at(round) or self._newest_s > SLOW_S:
            self._wire.read(round, self._exchange.traffic())
        if not self._samples or round < self._looks_until:
            return {}
        if self._wire.counts:
            known = self._wire.bytes_per_s is not None or self._verdict()
            return self._choose(round) if looked and known else {}
        if self._looks_until:  # both sizes have been seen
            self._looks_until, said = 0, self._choose(round)
            if "setting" in said and _near(Setting(**said["setting"]), self._usual):
                self._look_again = CONFIRMED * round
            return said
        if self._drifted or round >= self._look_again:
            current = self._joint.cuts.newest
            since = round + self._strategy.in_flight
            if since <= current.since:  # once that change is in force
                return {}
            self._drifted, self._look_again = False, LATER * round
            other = self._strategy.probe(current.setting)
            if other != current.setting:
                said = self._propose(other, since, self._link(), why="")
                self._forget(before=current.since)  # of the current cut perhaps nothing has landed yet
                self._usual, self._looks_until = current.setting, since + LOOK_ROUNDS
                return said
        elif not _looked_at(round):
            return {}
        return self._choose(round)

    def _choose(self, round: int) -> dict[str, Any]:
        link = self._link()
        current = self._joint.cuts.newest
        step_s = self._meter.step_s or None
        size, handling_s = self._joint.size, self._meter.handling_s or None
        verdict = self._verdict()
        rest_s = self._rest_s(link)
        measured = Measured(
            size,
            len(self._generation.members),
            round,
            link,
            step_s,
            handling_s,
            rest_s=rest_s,
            run_steps=self._run_steps() if follows_run(self._strategy) else None,
            steps=self._meter.steps,
            hurts=bool(verdict),
        )
        chosen = self._strategy.setting(measured, current.setting)
        if self._wire.counts and self._explained and not verdict:
            chosen = self._certain(measured, chosen, current.setting)
        since = round + self._strategy.in_flight
        why = "; ".join(filter(None, (verdict, self._strategy.explain(measured, chosen))))
        if chosen != current.setting and since > current.since:
            return self._propose(chosen, since, link, why)
        if why and not self._explained:
            self._propose(current.setting, current.since, link, why)
        return {}

    def _run_steps(self) -> float | None:
        """Steps of the run in all, by whichever limit is the lowest; None where it has none."""
        plan, limits = self._plan, []
        if plan.steps is not None:
            limits.append(float(plan.steps))
        if plan.epochs is not None:
            limits.append(float(plan.epochs * self._batches_per_epoch))
        if plan.seconds is not None and self._meter.step_s:
            limits.append(plan.seconds / self._meter.step_s)
        return min(limits, default=None)

    def _certain(self, measured: Measured, chosen: Setting, current: Setting) -> Setting:
        """What is right however wrong the measurements are by chance; the setting in force until it has been tried.

        A change is tried for as many rounds as were before it, unless the wire carries twice or half as much since.
        """
        assert measured.link is not None
        then, now = self._changed_at[1], measured.link.bytes_per_s
        if measured.rounds < LATER * self._changed_at[0] and then / DRIFT <= now <= then * DRIFT:
            return current
        wanted = [chosen]
        for factor in (1 / CERTAIN, CERTAIN):
            link, rest_s = measured.link.times(factor), measured.rest_s / factor
            handling_s = (measured.handling_s or 0.0) / factor**2  # it is timed on a busy processor
            other = dataclasses.replace(measured, link=link, rest_s=rest_s, handling_s=handling_s)
            wanted.append(self._strategy.setting(other, current))
        return _least_change(current, tuple(wanted))

    def _propose(self, setting: Setting, since: int, link: Link, why: str) -> dict[str, Any]:
        self._explained = self._explained or bool(why)
        fields = dataclasses.asdict(setting)
        self._changed_at = since, link.bytes_per_s
        self._reports.event(
            "setting_changed",
            since=since,
            setting=fields,
            latency_s=link.latency_s,
            bytes_per_s=link.bytes_per_s if link.bytes_per_s < 1e15 else None,
            step_s=self._meter.step_s or None,
            why=why,
        )
        return {"setting": fields, "since": since}

    def _remember(self, sample: Sample) -> None:
        order = round(math.log2(sample.size_bytes))
        mine = self._samples.setdefault(order, deque(maxlen=SAMPLES))
        newest, before = list(mine)[-JUDGED:], list(mine)[:-JUDGED]
        if len(before) >= JUDGED:
            usual = median(past.seconds for past in before)
            off = [past.seconds / max(1e-9, usual) for past in newest]
            if min(off) > DRIFT or max(off) < 1 / DRIFT:
                self._drifted = True
                self._forget(before=newest[0].round)
                mine = self._samples.setdefault(order, deque(maxlen=SAMPLES))
        mine.append(sample)

    def _forget(self, *, before: int) -> None:
        """Leaves what was seen from a round on."""
        left = {order: [past for past in kind if past.round >= before] for order, kind in self._samples.items()}
        self._samples = {order: deque(kind, maxlen=SAMPLES) for order, kind in left.items() if kind}

    def _link(self) -> Link:
        """What the sockets say; without them what rounds took.

        A round that took much longer than most of its size met with something else: it counts as twice the usual.
        """
        if (bytes_per_s := self._wire.bytes_per_s) is not None:
            return Link(self._wire.round_trip_s, bytes_per_s)
        sizes, seconds = [], []
        for kind in self._samples.values():
            most = UNUSUAL * median_low(past.seconds for past in kind)
            sizes += [past.size_bytes for past in kind]
            seconds += [min(past.seconds, most) for past in kind]
        return fit_link(sizes, seconds)

    def _rest_s(self, link: Link) -> float:
        """What a round takes that the link does not explain; nothing where rounds themselves tell what the link is."""
        if self._wire.bytes_per_s is None:
            return 0.0
        newest = max(self._samples.values(), key=lambda kind: kind[-1].round)
        return max(0.0, median(past.seconds - link.seconds(past.size_bytes) for past in newest))


def _near(one: Setting, other: Setting) -> bool:
    """Whether two settings differ by no more than chance makes of the same link."""
    fewer, more = sorted((one.fragments, other.fragments))
    return one.codec == other.codec and more <= fewer * ALIKE


def _least_change(current: Setting, wanted: tuple[Setting, ...]) -> Setting:
    """Of settings that may all be right the one that changes least; the one in force, where it is among them."""

    def apart(other: Setting) -> tuple[bool, float, float]:
        bits = abs(math.log2(_bits(other) / _bits(current)))
        return other.wait != current.wait, bits, abs(math.log2(other.fragments / current.fragments))

    nearest = min(wanted, key=apart)
    alike = [
        each for each in wanted if dataclasses.replace(each, fragments=1) == dataclasses.replace(current, fragments=1)
    ]
    fewer, most = (edge([each.fragments for each in alike], default=0) for edge in (min, max))
    return current if fewer <= current.fragments <= most else nearest


def _bits(setting: Setting) -> int:
    return codec(setting.codec or "float32").bits


def _looked_at(round: int) -> bool:
    return round < EVERY_ROUND_UNTIL or round % THEN_EVERY == 0
