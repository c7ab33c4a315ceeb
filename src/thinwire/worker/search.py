"""Steps of an optimizer that evaluates loss and gradient as often as it likes, each time over all workers' rows.

An evaluation is a round: every worker contributes the gradient of its batch, and says the loss in its note. Replicas
are equal and get the same loss and the same gradient. They therefore take the same decisions and evaluate equally
often. A worker without rows in a step takes it too, with the mean of the others' evaluations.

Why a step is taken again when a worker is lost in the middle of it:

1. workers 0, 1 and 2 have evaluated the loss of their three batches; worker 2 is lost
2. the next evaluation is of two batches: its loss may be lower although the step went nowhere
3. both workers see in the round's notes that the contributors have changed, and take the step again from its start,
   with an optimizer that has forgotten what it learnt

They do the same where the contributors have changed since the step before: a difference between gradients of different
rows says nothing of the curvature.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from thinwire.errors import DivergedError
from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.rules.finite import is_finite
from thinwire.strategies import Share
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.mean_gradient import absent_from
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Batch, Synchronizer, Wait

NOTE = "search"
"""The note of an evaluation: the step's first round, the evaluation's number, loss, weight, and the contributors to
the step before, where the worker knows them and the evaluation is the first of its step."""


class _NobodyError(Exception):
    """No worker has contributed to a step."""


class _OthersError(Exception):
    """An evaluation is of other rows than the first evaluation of its step."""


class _SupersededError(Exception):
    """A peer's state, which has this step in it, has come in the place of this worker's."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__("a peer's state has come")
        self.shared = shared


@final
class Search(Synchronizer):
    """See `thinwire.worker.ports.Synchronizer`.

    Args:
        worker: this worker's number.
        round_s: the longest wait for a round.
        weigh: the weight of a step's rows.
        publish: takes up publications that were put off until a step is over.
    """

    mid_step = False

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        rounds: OpenRounds,
        *,
        worker: int,
        wait: Wait,
        round_s: float,
        weigh: Callable[[Batch], float],
        publish: Callable[[], None],
    ) -> None:
        self._replica, self._strategy, self._meter = local.replica, local.strategy, local.meter
        self._generation, self._rounds, self._worker = generation, rounds, worker
        self._wait, self._round_s, self._weigh, self._publish = wait, round_s, weigh, publish
        self._only_follows = False
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

    def prepare(self) -> None:
        """Takes the steps that others have begun without this worker, before it computes a gradient of its own."""
        generation, rounds = self._generation, self._rounds
        up = lambda: generation.alone or (rounds.next <= rounds.landed and not generation.needs_state)  # noqa: E731
        self._wait(up, "steps that others have begun", self._round_s)

    def take(self, batch: Batch, *, takes: bool, together: bool) -> None:
        if together:
            rows = self._weigh(batch)
            self._share = Share(self._rounds.landed, 1, rows, self._generation.lead) if takes and rows > 0 else None
            self._take()
        elif takes:
            self._take_alone()
        else:
            self._replica.advance()

    def _take_alone(self) -> None:
        """Takes a step on the own rows: there is no other worker."""
        alone = [self._worker]
        if self._contributors not in (None, alone):
            self._replica.begin_anew()
        self._contributors = alone
        self._replica.update()

    def land(self, landed: Landed, fragment: Fragment, snapshot: Snapshot | None) -> None:
        """A round has landed: it is an evaluation of the step under way, or begins a step of the others."""
        self._came.append(landed)
        if not self.mid_step:
            self._share = None
            self._take()

    def finish(self) -> None:
        self._only_follows = True

    def supersede(self, shared: dict[str, Any]) -> None:
        """A peer's state has been taken over."""
        self._came.clear()
        if self.mid_step:
            self._superseded = shared

    def _take(self) -> None:
        """Takes a step, and then steps that others had begun when a peer's state came in its place."""
        self._take_one()
        while self._came:
            self._share = None
            self._take_one()
            self._publish()

    def _take_one(self) -> None:
        replica = self._replica
        self._superseded, self.mid_step, self._announces = None, True, True
        try:
            self._take_from(replica.vector.detach().clone())
        except _NobodyError:
            replica.advance()
        except _SupersededError as superseded:
            replica.load_shared(superseded.shared)  # once more: the optimizer has changed the parameters on its way out
        finally:
            self.mid_step = False

    def _take_from(self, start: Tensor) -> None:
        """Takes the step, from its start again each time that the contributors change."""
        replica = self._replica
        while True:
            self._began, self._number = self._came[0].round if self._came else self._rounds.landed, 0
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
        replica = self._replica
        absent = absent_from(landed.notes.values())
        replica.parameters.scatter_gradients(landed.reply.to(replica.vector.device), absent)
        losses = [(math.inf if loss is None else loss, weight) for _, _, loss, weight, _ in told.values()]
        mean = sum(loss * weight for loss, weight in losses) / sum(weights.values())
        return torch.tensor(mean, dtype=torch.float64)

    def _begin(self, told: dict[int, Any], weights: dict[int, float]) -> None:
        """The first evaluation of a step: raises unless the contributors are those of the step before."""
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
                    f"worker {self._worker} is at evaluation {self._number} of the step that began in "
                    f"round {self._began}, and worker {worker} at evaluation {number} of that of round {began}: the "
                    "same losses led to different decisions; use an optimizer that draws nothing at random and keeps "
                    "all it learns in its state, on processors of one kind"
                )

    def _exchange(self) -> Landed:
        """Contributes to the next round, unless the exchange has taken part in it already, and waits until it lands."""
        round = self._rounds.landed
        if not self._only_follows and self._rounds.next <= round:
            self._contribute(round)
        began = self._meter.now()
        there = lambda: bool(self._came) or self._superseded is not None  # noqa: E731
        self._wait(there, f"round {round}", self._round_s)
        self._meter.waited(self._meter.now() - began)
        if self._superseded is not None:
            raise _SupersededError(self._superseded)
        return self._came.popleft()

    def _contribute(self, expected: int) -> None:
        replica = self._replica
        values, weight, note = None, 0.0, dict[str, Any]()
        if self._share is not None:
            loss = float(replica.again())
            gradient = torch.zeros_like(replica.vector)
            replica.parameters.gather_gradients(gradient)
            host, share = gradient.cpu(), self._strategy.weight(self._share)
            finite = math.isfinite(loss) and is_finite(host)
            last = self._contributors if self._number == 0 else None
            note = {NOTE: [self._began, self._number, loss if finite else None, share, last]}
            if finite:
                values, weight = Snapshot(host, host), share
                note["absent"] = replica.parameters.absent()
        round, fragment = self._rounds.claim()
        if round != expected:  # the exchange has taken part in the expected round by itself
            values, weight, note = None, 0.0, {}
        self._rounds.launch(round, fragment, values, weight, note=note, announces=self._announces)
        self._announces = False
