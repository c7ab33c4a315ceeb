"""Whether exchanging helps: early in a run the joint model is compared with replicas, one of which learnt alone.

Each worker compares both on its own validation rows at a few numbers of steps, and says what it found in its notes to
rounds, so that all workers hear the same. The first worker has the strategy act on it. Until the first comparison the
last worker takes part in rounds without giving or taking anything: it is the one-worker baseline, and starts from the
joint model after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import torch

from thinwire.exchange.signals import Landed
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batch, Batches
from thinwire.worker.reports import Reports

TRIALS = (100, 400, 1600)
"""Steps at which a worker compares."""
BATCHES = 8
"""Validation batches that are compared on."""
LONG = 10
"""A run shorter than this many times the first comparison has none: the baseline would cost more than it saves."""
FEWEST = 3
"""Workers below which there is no baseline."""
MARGIN, SURE, FEWEST_BATCHES = 0.02, 4.0, 4
"""A model is worse if its loss is higher by this share and by these standard errors, over at least these batches."""
GROSS = 1.0
"""A model is worse if its loss is higher by this share, however few the batches."""
HUGE = 1e30


@final
class Comparison:
    """One worker's part in the comparisons."""

    def __init__(
        self, plan: WorkerPlan, local: LocalModel, generation: Generation, *, reports: Reports, batches: Batches
    ) -> None:
        self._plan, self._local, self._generation = plan, local, generation
        self._reports, self._batches = reports, batches
        self._joint, self._meter = local.joint, local.meter
        self.learns_alone = False
        """Whether this worker is the baseline now."""
        self._next = len(TRIALS)
        self._verdict, self._caution = "", 0
        self._mine: dict[str, Any] = {}
        self._judged: set[int] = set()
        self._heard: dict[int, dict[int, dict[str, Any]]] = {}

    @property
    def verdict(self) -> str:
        """What the comparison found wrong with the joint model under the setting in force; the same on every worker."""
        return self._verdict if self._joint.cuts.newest.setting.caution == self._caution else ""

    def begin(self) -> None:
        """At the start of a run, before the first step."""
        plan, steps, members = self._plan, self._meter.steps, self._generation.members
        limit = plan.steps or (plan.epochs or math.inf) * self._batches.batches_per_epoch
        wanted = self._local.strategy.guards and plan.evaluates and limit >= LONG * TRIALS[0]
        if wanted and not self._local.replica.buffers.size:  # running statistics are each replica's own
            self._next = sum(trial <= steps for trial in TRIALS)
            new = steps == 0 and self._joint.landed == 0 and len(members) >= FEWEST
            self.learns_alone = new and plan.worker == members[-1]

    def step(self) -> None:
        """After every step."""
        if self._next < len(TRIALS) and self._meter.steps >= TRIALS[self._next]:
            self._try()
            self._next += 1

    def leave(self) -> None:
        """The baseline starts from the joint model and drops what it learnt alone, unless there is no other worker."""
        was, self.learns_alone = self.learns_alone, False
        if was and not self._generation.alone and self._joint.model is not None:
            with self._joint.lock:
                self._local.restart()
            self._local.open()
            self._local.weigh_anew()

    def note(self) -> dict[str, Any]:
        """The last finding, said with each round until a round with it has landed."""
        return {"trial": self._mine} if self._mine else {}

    def see(self, landed: Landed) -> None:
        """Takes findings from a round's notes, and judges a comparison when all members have spoken."""
        for number, note in landed.notes.items():
            found = note.get("trial")
            if found and int(found["number"]) not in self._judged:
                self._heard.setdefault(int(found["number"]), {})[number] = found
                if number == self._plan.worker and found["number"] == self._mine.get("number"):
                    self._mine = {}
        members, rows = self._generation.members, self._generation.rows
        for trial in sorted(self._heard):
            if {w for w in members if rows.get(w)} <= set(self._heard[trial]):  # workers without rows say nothing
                self._judged.add(trial)
                self._judge(trial, self._heard.pop(trial))

    def _try(self) -> None:
        replica, joint = self._local.replica, self._joint.model
        own = replica.vector.detach()
        if joint is None or self._generation.alone:
            self.leave()
            return
        with self._joint.lock:
            joint = joint.clone()
        buffers = replica.buffers.named(replica.buffers.vector(), replica.buffers.counts())
        batches = list(islice(self._batches.validation(), BATCHES))
        pairs = [(self._loss(b, joint, buffers), self._loss(b, own, buffers)) for b in batches]
        self._mine = {"number": self._next, "alone": self.learns_alone, "losses": [p for p in pairs if None not in p]}
        self.leave()

    def _loss(self, batch: Batch, model: torch.Tensor, buffers: dict[str, torch.Tensor]) -> float | None:
        sums, weights, _ = self._local.replica.evaluate(iter((batch,)), model, buffers)
        if not weights.get("val_loss"):
            return None
        return min(HUGE, float(sums["val_loss"]) / float(weights["val_loss"]))

    def _judge(self, trial: int, heard: dict[int, dict[str, Any]]) -> None:
        found = {w: Compared.of(f["losses"]) for w, f in heard.items() if f["losses"] and not f["alone"]}
        if not found:
            return
        # the best of many replicas by a few rows is luck
        many = [w for w in found if len(heard[w]["losses"]) >= FEWEST_BATCHES]
        best = min(many or found, key=lambda w: found[w].own / max(1e-12, found[w].joint))
        everyone = Compared.of([pair for f in heard.values() if not f["alone"] for pair in f["losses"]])
        alone = next((Compared.of(f["losses"]) for f in heard.values() if f["losses"] and f["alone"]), None)
        said = ""
        if alone is not None and alone.worse:
            said = f"{alone.joint:.4g} against {alone.own:.4g} of one worker alone"
        elif many and found[best].worse:
            said = f"{found[best].joint:.4g} against {found[best].own:.4g} of worker {best}'s replica"
        elif everyone.worse:
            said = f"{everyone.joint:.4g} against {everyone.own:.4g} of the replicas"
        if said:
            self._caution = self._joint.cuts.newest.setting.caution
            self._verdict = f"after {TRIALS[trial]} steps the joint model has a validation loss of {said}"
        if self._generation.lead:
            self._reports.event(
                "tried",
                steps=TRIALS[trial],
                joint=everyone.joint,
                replicas=everyone.own,
                best=found[best].own,
                joint_there=found[best].joint,
                alone=alone.own if alone else None,
                joint_beside=alone.joint if alone else None,
                hurts=self._verdict if said else "",
            )


class Compared(NamedTuple):
    """Mean losses of two models on the same batches."""

    joint: float
    own: float
    worse: bool
    """Whether the joint model's is higher by more than a little, and by more than chance."""

    @classmethod
    def of(cls, pairs: Sequence[Sequence[float]]) -> Compared:
        """From the joint model's and the replica's loss on each batch.

        >>> Compared.of([(0.5, 0.4), (0.6, 0.4), (0.5, 0.3), (0.7, 0.5)]).worse
        True
        >>> Compared.of([(0.5, 0.4), (0.6, 0.7), (0.5, 0.3), (0.7, 0.5)]).worse
        False
        """
        gaps = [joint - own for joint, own in pairs]
        joint, own = statistics.mean(j for j, _ in pairs), statistics.mean(o for _, o in pairs)
        if len(pairs) < FEWEST_BATCHES or joint <= own * (1 + MARGIN):
            return cls(joint, own, worse=joint > own * (1 + GROSS))
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        return cls(joint, own, worse=statistics.mean(gaps) > SURE * error)
