"""Slots on Spark: a worker that is done retires where another worker waits for its slot."""

from __future__ import annotations

from thinwire.coordinator.membership import ROWS_ARE_DONE, Decision, Membership, Send


class Slots:
    """Decides which finished worker retires, and whether a worker without a slot may still come."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._roster, self._deadlines = membership, membership.roster, membership.deadlines
        self._freed_at: float | None = None
        """Time at which a worker last retired."""

    def make_room(self, finished: set[int], lost: set[int], now: float) -> list[Decision]:
        """Retires a finished worker, where a worker that never joined or was lost may be waiting for a slot."""
        members, unseen = self._membership, self._roster.unseen
        wait_s = self._deadlines.gather_s * (1 if unseen else 3)  # a lost worker's successor may be on its way
        waiting = (
            bool(unseen or lost)
            and members.agreement.formed
            and not members.agreement.changing
            and members.groups.size == 1
        )
        if not waiting or now - members.last_move < wait_s:
            return []
        done = [s for s in members.seats.values() if s.worker in finished and members.can_spare(s, now)]
        if not done:
            return []
        seat = max(done, key=lambda s: s.worker)
        self._freed_at = now
        members.retire(seat, now)
        return [Send(seat.worker, seat.attempt, ROWS_ARE_DONE)]

    def room_for(self, finished: set[int], lost: set[int], now: float) -> bool:
        """Whether a worker that never joined or was lost may still come, once all present workers are done."""
        members = self._membership
        if (not self._roster.unseen and not lost) or members.groups.size > 1:
            return False
        waited = self._freed_at is not None and now - self._freed_at < self._deadlines.rejoin_s
        return waited or sum(not s.blank for s in members.seats.values() if s.worker in finished) > 1
