"""Publications of a run: evaluations until they are judged, and checkpoints until they are committed."""

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
"""Seconds that a diverged run waits for the commit of the checkpoint to resume from."""


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
        """Continues from the state that a checkpoint holds."""
        self._evaluations.law.load(kept["verdict"])
        self._outcome.history = list(kept["history"])
        self._before_s = float(self._outcome.history[-1].get("seconds", 0.0)) if self._outcome.history else 0.0
        self._outcome.train_loss = kept.get("train_loss")

    @property
    def best(self) -> tuple[int | None, dict[str, float]]:
        """The number of the best evaluation, and its metrics."""
        return self._evaluations.law.best_at, self._evaluations.law.best_metrics

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint holds beside the workers' parts."""
        kept = {"verdict": self._evaluations.law.state(), "history": list(self._outcome.history)}
        return kept | self._meta() | {"train_loss": self._outcome.train_loss}

    # -- reports ----------------------------------------------------------------------------------------------------

    def on_evaluated(self, worker: int, report: messages.Evaluated) -> None:
        self._evaluations.hear(worker, report)
        for verdict in self._evaluations.told(report.number):  # for a worker that has joined since
            self._send(worker, report.attempt, verdict)

    def on_caught(self, worker: int, caught: messages.Caught) -> None:
        """Excuses a worker from publications that were made before it held the joint state."""
        self._evaluations.excused[worker] = caught.published
        self._membership.caught(worker)

    def on_saved(self, worker: int, saved: messages.Saved) -> None:
        self._commits.hear(worker, saved)

    def welcome(self, worker: int, attempt: int, *, back: bool) -> None:
        """Tells a joining worker the verdicts it missed; a worker that is new, only those that end the run."""
        for verdict in self._evaluations.verdicts:
            if back or verdict.stop:
                self._send(worker, attempt, verdict)
        self._evaluations.excused.pop(worker, None)

    # -- verdicts and commits --------------------------------------------------------------------------------------

    def judge(self, trained_from: float, held: int) -> None:
        """Judges evaluations whose reports are complete, and sends each verdict to every worker.

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
            self._emit(outcome.record(judged.event))
            if judged.stop is not None:
                outcome.stopped_early = True
                outcome.reason = outcome.reason or judged.stop
            for seat in members.seats.values():
                self._send(seat.worker, seat.attempt, judged.verdict())

    def settle(self, patience_s: float = 0.0) -> None:
        """Begins to commit whole checkpoints, and reports finished commits; waits up to `patience_s` for them."""
        needed = set(self._membership.agreement.members) & set(self._membership.seats)
        for _ in range(2 if patience_s else 1):  # the second pass commits what became whole during the first
            self._commits.begin(needed, self._kept)
            for event in self._commits.ended(patience_s):
                self._emit(self._outcome.record(event))

    def stop(self) -> None:
        """The run has diverged: commits what is whole by now, so that the error can name it, and nothing later."""
        self.settle(LAST_COMMIT_S)
        self._commits.stop()
