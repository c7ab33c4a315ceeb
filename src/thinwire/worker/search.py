"""Steps of an optimizer that evaluates loss and gradient as often as it likes, each time over all workers' rows.

An evaluation is a round: every worker contributes the gradient of its batch, and says the loss in its note. Replicas
are equal, are told the same loss and the same gradient, and so take the same decisions: they evaluate equally often.
A worker without rows in a step takes it too, with what the others' evaluations come to.

Why a step is taken again when a worker is lost in the middle of it:

1. workers 0, 1 and 2 have evaluated the loss of their three batches; worker 2 is lost
2. the next evaluation is of two batches: it may be lower without being further down
3. both workers see in the round's notes that others contributed than to the first, and take the step again from its
   start, with an optimizer that has forgotten what it learnt

So do they where others contribute to a step than to the one before: a difference between gradients of different rows
says nothing of the curvature.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.rules.finite import is_finite
from thinwire.strategies import Share
from thinwire.worker.landing import absent_from

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker

NOTE = "search"
"""What a contributor says with an evaluation: the step's first round, the evaluation's number, loss, weight, and who
contributed to the step before, where it knows that and the evaluation is a step's first."""


class _NobodyError(Exception):
    """No worker has contributed to a step."""


class _OthersError(Exception):
    """An evaluation is of other rows than the first one of its step."""


class _SupersededError(Exception):
    """A peer's state, with this step done, has come in the place of this worker's."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__("a peer's state has come")
        self.shared = shared


class Search:
    """One worker's part in them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.under_way = False
        """Whether a step is: its rounds are no steps of their own."""
        self.only_follows = False
        """Whether this worker's own rows are done, so that its exchange takes part in rounds by itself."""
        self._share: Share | None = None
        """What this worker contributes to the step under way; None for nothing."""
        self._came: deque[Landed] = deque()
        """Evaluations that have landed here and are not taken up yet."""
        self._superseded: dict[str, Any] | None = None
        self._began = self._number = 0
        self._announces = False
        self._weights: dict[int, float] = {}
        self._contributors: list[int] | None = None
        """To the last step, where this worker has taken one."""

    # -- steps ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Takes the steps that others have begun without this worker, before it computes a gradient of its own."""
        worker = self._worker
        worker.wait(self._has_caught_up, "steps that others have begun", worker.plan.deadlines.round_s)

    def _has_caught_up(self) -> bool:
        worker = self._worker
        return worker.alone or (worker.exchange.next_round <= worker.landed and not worker.needs_state)

    def step(self, rows: float, *, takes: bool) -> None:
        """Takes a step with the others, on the gradient just computed; one that is not taken contributes nothing."""
        worker = self._worker
        self._share = Share(worker.landed, 1, rows, worker.lead) if takes and rows > 0 else None
        self._take()

    def step_alone(self) -> None:
        """Takes a step on the own rows: there is no other worker."""
        replica, alone = self._worker.replica, [self._worker.plan.worker]
        if self._contributors not in (None, alone):
            replica.begin_anew()
        self._contributors = alone
        replica.update()

    def follow(self, landed: Landed) -> None:
        """A round has landed: it is an evaluation of the step under way, or begins one of the others."""
        self._came.append(landed)
        if not self.under_way:
            self._share = None
            self._take()

    def supersede(self, shared: dict[str, Any]) -> None:
        """A peer's state has been taken over."""
        self._came.clear()
        if self.under_way:
            self._superseded = shared

    def _take(self) -> None:
        """Takes a step, and those that others had begun when a peer's state came in its place."""
        self._take_one()
        while self._came:
            self._share = None
            self._take_one()
            self._worker.publisher.publish_deferred()

    def _take_one(self) -> None:
        replica = self._worker.replica
        self._superseded, self.under_way, self._announces = None, True, True
        try:
            self._take_from(replica.vector.detach().clone())
        except _NobodyError:
            replica.advance()
        except _SupersededError as superseded:
            replica.load_shared(superseded.shared)  # once more: what the optimizer did on its way out is undone
        finally:
            self.under_way = False

    def _take_from(self, start: Tensor) -> None:
        """Takes the step, from its start again as often as others contribute than did at first."""
        replica = self._worker.replica
        while True:
            self._began, self._number = self._came[0].round if self._came else self._worker.landed, 0
            try:
                replica.update(self._evaluate)
                return
            except _OthersError:
                with torch.no_grad():
                    replica.vector.copy_(start)
                replica.begin_anew()

    # -- evaluations ------------------------------------------------------------------------------------------------

    def _evaluate(self) -> Tensor:
        """The closure: the mean loss over all workers' rows, with its gradient in the parameters."""
        landed = self._came.popleft() if self._came else self._exchange()
        told = {worker: note[NOTE] for worker, note in sorted(landed.notes.items()) if NOTE in note}
        self._check(told)
        weights = {worker: float(weight) for worker, (_, _, _, weight, _) in told.items()}
        if self._number == 0:
            self._begin(told, weights)
        elif weights != self._weights:
            raise _OthersError
        self._number += 1
        replica = self._worker.replica
        absent = absent_from(landed.notes.values())
        replica.parameters.scatter_gradients(landed.reply.to(replica.vector.device), absent)
        losses = [(math.inf if loss is None else loss, weight) for _, _, loss, weight, _ in told.values()]
        mean = sum(loss * weight for loss, weight in losses) / sum(weights.values())
        return torch.tensor(mean, dtype=torch.float64)

    def _begin(self, told: dict[int, Any], weights: dict[int, float]) -> None:
        """A step's first evaluation: of nobody's rows, of other workers' than the step before, or a good one."""
        if not weights:
            raise _NobodyError
        before = next((last for *_, last in told.values() if last is not None), None)
        self._weights, self._contributors = weights, list(weights)
        if before is not None and before != self._contributors:
            raise _OthersError

    def _check(self, told: dict[int, Any]) -> None:
        for worker, (began, number, *_) in told.items():
            if (began, number) != (self._began, self._number):
                raise DivergedError(
                    f"worker {self._worker.plan.worker} is at evaluation {self._number} of the step that began in "
                    f"round {self._began}, and worker {worker} at evaluation {number} of that of round {began}: the "
                    "same losses led to different decisions; use an optimizer that draws nothing at random and keeps "
                    "all it learns in its state, on processors of one kind"
                )

    def _exchange(self) -> Landed:
        """Contributes to the next round, unless the exchange has taken part in it already, and waits for it."""
        worker = self._worker
        round = worker.landed
        if not self.only_follows and worker.exchange.next_round <= round:
            self._contribute(round)
        began = worker.time.now()
        there = lambda: bool(self._came) or self._superseded is not None  # noqa: E731
        worker.wait(there, f"round {round}", worker.plan.deadlines.round_s)
        worker.meter.waited(worker.time.now() - began)
        if self._superseded is not None:
            raise _SupersededError(self._superseded)
        return self._came.popleft()

    def _contribute(self, expected: int) -> None:
        worker, replica = self._worker, self._worker.replica
        values, weight, note = None, 0.0, dict[str, Any]()
        if self._share is not None:
            loss = float(replica.again())
            gradient = torch.zeros_like(replica.vector)
            replica.parameters.gather_gradients(gradient)
            host, share = gradient.cpu(), worker.strategy.weight(self._share)
            finite = math.isfinite(loss) and is_finite(host)
            last = self._contributors if self._number == 0 else None
            note = {NOTE: [self._began, self._number, loss if finite else None, share, last]}
            if finite:
                values, weight = Snapshot(host, host), share
                note["absent"] = replica.parameters.absent()
        round, fragment = worker.exchange.claim()
        if round != expected:  # its exchange has taken part in that one meanwhile, without it
            values, weight, note = None, 0.0, {}
        worker.send_off(round, fragment, values, weight, announces=self._announces, **note)
        self._announces = False
