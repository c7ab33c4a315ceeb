"""How long a run has trained, and whether that is long enough."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.coordinator.attendance import Attendance
from thinwire.coordinator.ending import Ending
from thinwire.coordinator.membership import Membership
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.records import Records
from thinwire.protocol.clock import Clock


class Over(NamedTuple):
    """The reason to stop, and whether the run stops early."""

    reason: str
    early: bool


class TrainingTime:
    """Seconds that a run has trained, including those of the run that it resumes."""

    def __init__(self, policy: Policy, membership: Membership, records: Records, attendance: Attendance,
                 ending: Ending, clock: Clock, *, before: float) -> None:  # fmt: skip
        self._policy, self._membership, self._records = policy, membership, records
        self._attendance, self._ending, self._clock, self._before = attendance, ending, clock, before

    @property
    def seconds(self) -> float:
        """Seconds of training up to now."""
        begun, ended = self._ending.trained_from, self._ending.since
        return self._before + (0.0 if begun is None else (ended or self._clock()) - begun)

    def over(self) -> Over | None:
        """The reason to stop: the time is over, or all have done their epochs and some have gone on past them."""
        policy, members = self._policy, self._membership
        if policy.seconds is not None and self.seconds >= policy.seconds:
            return Over(f"{policy.seconds:g} s of training are over", early=True)
        if policy.epochs is None or len(members.agreement.members) < policy.workers:
            return None
        at = {worker: self._records.progress_of(worker).get("position") or (0, 0) for worker in members.working}
        done = {w for w, (epoch, _) in at.items() if epoch >= policy.epochs} | self._attendance.finished
        if any(tuple(place) > (policy.epochs, 0) for place in at.values()) and members.working <= done:
            return Over("all rows done", early=False)
        return None
