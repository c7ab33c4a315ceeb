"""Whether exchanging helps: early in a run the joint model is compared with replicas, one of which learnt alone.

Each worker looks at its own validation rows, at a few numbers of steps, and says what it found in its notes to rounds,
so that all workers hear the same; the first one has the strategy act on it. Until the first such trial the last worker
takes part in rounds without giving or taking anything: it is the one-worker reference, and starts from the joint
model after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thinwire.exchange.signals import Landed

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker

TRIALS = (100, 400, 1600)
"""Steps at which a worker compares."""
BATCHES = 8
"""Validation batches it looks at."""
LONG = 10
"""A run shorter than so many times the first trial has none: the reference would cost more than it saves."""
FEWEST = 3
"""Workers below which nobody learns alone."""
MARGIN, SURE, FEWEST_BATCHES = 0.02, 4.0, 4
"""A loss higher by this share, and by so many standard errors over at least so many batches, is worse."""
GROSS = 1.0
"""One higher by this share is so, however few batches say it."""
HUGE = 1e30


class Guard:
    """One worker's part in the trials."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.alone = False
        """Whether this worker is the reference now."""
        self.since = 0
        """Rounds before this one are in what it started from: their replies are not for it."""
        self._next = len(TRIALS)
        self._verdict, self._caution = "", 0
        self._mine: dict[str, Any] = {}
        self._judged: set[int] = set()
        self._heard: dict[int, dict[int, dict[str, Any]]] = {}

    @property
    def verdict(self) -> str:
        """What was found to hurt under the setting in force; the same on every worker."""
        return self._verdict if self._worker.joint.cuts.newest.setting.caution == self._caution else ""

    def begin(self) -> None:
        """At the start of a run, before the first step."""
        worker = self._worker
        limit = worker.plan.steps or (worker.plan.epochs or math.inf) * worker.batches.batches_per_epoch
        wanted = worker.strategy.guards and worker.plan.evaluates and limit >= LONG * TRIALS[0]
        if wanted and not worker.replica.buffers.size:  # running statistics are each replica's own
            self._next = sum(steps <= worker.meter.steps for steps in TRIALS)
            new = worker.meter.steps == 0 and worker.joint.landed == 0 and len(worker.members) >= FEWEST
            self.alone = new and worker.plan.worker == worker.members[-1]

    def step(self) -> None:
        """After every step."""
        if self._next < len(TRIALS) and self._worker.meter.steps >= TRIALS[self._next]:
            self._try()
            self._next += 1

    def leave(self) -> None:
        """The one alone starts from the joint model; what it learnt alone is dropped, unless there is nobody else."""
        worker, was = self._worker, self.alone
        self.alone = False
        if was and not worker.alone and worker.joint.model is not None:
            with worker.joint.lock, torch.no_grad():
                worker.replica.vector.copy_(worker.joint.model)
                self.since = worker.joint.landed
            worker.open_state()
            worker.weigh_anew()

    def note(self) -> dict[str, Any]:
        """What to say with a round: the last finding, until a round with it has landed."""
        return {"trial": self._mine} if self._mine else {}

    def see(self, landed: Landed) -> None:
        """Takes findings from a round's notes, and judges a trial when all members have spoken."""
        worker = self._worker
        for number, note in landed.notes.items():
            found = note.get("trial")
            if found and int(found["number"]) not in self._judged:
                self._heard.setdefault(int(found["number"]), {})[number] = found
                if number == worker.plan.worker and found["number"] == self._mine.get("number"):
                    self._mine = {}
        for trial in sorted(self._heard):
            if {w for w in worker.members if worker.totals.get(w)} <= set(self._heard[trial]):  # who has rows speaks
                self._judged.add(trial)
                self._judge(trial, self._heard.pop(trial))

    def _try(self) -> None:
        worker, replica = self._worker, self._worker.replica
        own = replica.vector.detach()
        joint = worker.joint.model
        if joint is None or worker.alone:
            self.leave()
            return
        with worker.joint.lock:
            joint = joint.clone()
        buffers = replica.buffers.named(replica.buffers.vector(), replica.buffers.counts())
        batches = list(islice(worker.batches.validation(), BATCHES))
        pairs = [(self._loss(b, joint, buffers), self._loss(b, own, buffers)) for b in batches]
        self._mine = {"number": self._next, "alone": self.alone, "losses": [p for p in pairs if None not in p]}
        self.leave()

    def _loss(self, batch: Any, model: torch.Tensor, buffers: dict[str, torch.Tensor]) -> float | None:
        sums, weights, _ = self._worker.replica.evaluate(iter((batch,)), model, buffers)
        if not weights.get("val_loss"):
            return None
        return min(HUGE, float(sums["val_loss"]) / float(weights["val_loss"]))

    def _judge(self, trial: int, heard: dict[int, dict[str, Any]]) -> None:
        worker = self._worker
        found = {w: Compared.of(f["losses"]) for w, f in heard.items() if f["losses"] and not f["alone"]}
        if not found:
            return
        many = [w for w in found if len(heard[w]["losses"]) >= FEWEST_BATCHES]  # the best of many by a few rows is luck
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
            self._caution = worker.joint.cuts.newest.setting.caution
            self._verdict = f"after {TRIALS[trial]} steps the joint model has a validation loss of {said}"
        if worker.lead:
            worker.event(
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
