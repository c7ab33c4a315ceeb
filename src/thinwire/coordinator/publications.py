"""What a run publishes: evaluations until they are judged, and checkpoints until they are committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.coordinator.checkpoints import CheckpointCommits
from thinwire.coordinator.evaluations import Evaluations
from thinwire.coordinator.membership import Membership
from thinwire.coordinator.outcome import Outcome, Policy
from thinwire.coordinator.ports import Commit, Emit, Send
from thinwire.coordinator.stopping import Verdict
from thinwire.protocol import messages
from thinwire.protocol.clock import Clock

LAST_COMMIT_S = 5.0
"""How long a run that has diverged waits for the checkpoint that it is to be gone on with from."""


class Publications:
    """Takes the workers' reports, and sends each verdict to all workers."""

    def __init__(
        self,
        membership: Membership,
        policy: Policy,
        outcome: Outcome,
        *,
        commit: Commit | None,
        meta: Callable[[], dict[str, Any]],
        clock: Clock,
        send: Send,
        emit: Emit,
    ) -> None:
        self._membership, self._outcome, self._meta, self._clock = membership, outcome, meta, clock
        self._send, self._emit = send, emit
        self._evaluations = Evaluations(Verdict(policy.stop, policy.until), policy.compute)
        self._commits = CheckpointCommits(policy.group_size, commit, clock)
        self._before_s = 0.0
        """Seconds of training before the run was resumed."""

    def load(self, kept: dict[str, Any]) -> None:
        """Goes on from what a checkpoint has kept."""
        self._evaluations.law.load(kept["verdict"])
        self._outcome.history = list(kept["history"])
        self._before_s = float(self._outcome.history[-1].get("seconds", 0.0)) if self._outcome.history else 0.0
        self._outcome.train_loss = kept.get("train_loss")

    @property
    def best(self) -> tuple[int | None, dict[str, float]]:
        """The number of the best evaluation, and its metrics."""
        return self._evaluations.law.best_at, self._evaluations.law.best_metrics

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the workers' parts."""
        kept = {"verdict": self._evaluations.law.state(), "history": list(self._outcome.history)}
        return kept | self._meta() | {"train_loss": self._outcome.train_loss}

    # -- reports ----------------------------------------------------------------------------------------------------

    def on_evaluated(self, worker: int, report: messages.Evaluated) -> None:
        self._evaluations.hear(worker, report)
        for verdict in self._evaluations.told(report.number):  # to a newcomer: the others have done this one
            self._send(worker, report.attempt, verdict)

    def on_caught(self, worker: int, caught: messages.Caught) -> None:
        """Publications up to this one were made before the worker had the joint state: it has no part in them."""
        self._evaluations.excused[worker] = caught.published
        self._membership.caught(worker)

    def on_saved(self, worker: int, saved: messages.Saved) -> None:
        self._commits.hear(worker, saved)

    def welcome(self, worker: int, attempt: int, *, back: bool) -> None:
        """Tells a worker that has joined what was judged without it; one that is new, only that the run is to end."""
        for verdict in self._evaluations.verdicts:
            if back or verdict.stop:
                self._send(worker, attempt, verdict)
        self._evaluations.excused.pop(worker, None)

    # -- what becomes of them ---------------------------------------------------------------------------------------

    def judge(self, trained_from: float, held: int) -> None:
        """Evaluations whose reports are all in come to a verdict, which every worker hears.

        Args:
            trained_from: when the first generation formed.
            held: validation rows of all workers together.
        """
        members, outcome = self._membership, self._outcome
        alive = set(members.agreement.members) & set(members.seats)
        done = {worker: int(progress.get("rows", 0)) for worker, progress in members.roster.remembered.items()}
        for judged in self._evaluations.ready(alive, done, members.roster.total_rows, outcome.train_loss, held):
            seconds = self._clock() - trained_from
            outcome.history.append(judged.row | {"seconds": round(seconds + self._before_s, 3)})
            self._emit(outcome.heed(judged.event))
            if judged.stop is not None:
                outcome.stopped_early = True
                outcome.reason = outcome.reason or judged.stop
            for seat in members.seats.values():
                self._send(seat.worker, seat.attempt, judged.verdict())

    def settle(self, patience_s: float = 0.0) -> None:
        """Has checkpoints that are whole committed, and hears what became of earlier ones; waits for them so long."""
        needed = set(self._membership.agreement.members) & set(self._membership.seats)
        for _ in range(2 if patience_s else 1):  # who waits also sees to what became whole behind the others
            self._commits.begin(needed, self._kept)
            for event in self._commits.ended(patience_s):
                self._emit(self._outcome.heed(event))

    def stop(self) -> None:
        """The run has diverged: what is whole by now is committed, so that the error names it, and nothing later is."""
        self.settle(LAST_COMMIT_S)
        self._commits.stop()
