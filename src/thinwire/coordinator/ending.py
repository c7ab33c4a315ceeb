"""The end of a run: who has the final model, what of it has come in, and who comes too late to matter."""

from __future__ import annotations

from thinwire.coordinator.membership import Membership
from thinwire.coordinator.model_chunks import ModelChunks
from thinwire.coordinator.ports import Send
from thinwire.protocol.messages import Conclude


class Ending:
    """What the coordinator knows of it, from the moment when all rows are done."""

    def __init__(self, membership: Membership, group_size: int, send: Send) -> None:
        self._membership, self._group_size, self._send = membership, group_size, send
        self.chunks = ModelChunks(group_size)
        self.since: float | None = None
        """When all rows were done."""
        self.agreed: set[int] = set()
        """Workers that hold the final model, its verdict and all else that its checkpoint and the user get."""
        self.late: set[int] = set()
        """Members of groups that came since it began."""

    def conclude(self) -> None:
        """Tells each worker how many rounds have landed in its lane, whoever launched them: it waits for those."""
        seats, lane_of = list(self._membership.seats.values()), self._membership.groups.lane_of
        landed: dict[int, int] = {}
        for seat in seats:
            landed[lane_of(seat.worker)] = max(seat.landed, landed.get(lane_of(seat.worker), 0))
        for seat in seats:
            self._send(seat.worker, seat.attempt, Conclude(landed=landed[lane_of(seat.worker)]))

    @property
    def closed(self) -> bool:
        """Whether nobody who comes now is needed: all who are there have done their rows, and can end without it.

        A group that has lost a member cannot do without a new one, unless another group holds the final model: a
        successor would make its last steps again, and its group would end on another model.
        """
        return self.chunks.whole or (self.since is not None and (self._group_size == 1 or self._agreed()))

    def _agreed(self) -> bool:
        """Whether all members of one group hold the final model."""
        groups = [worker // self._group_size for worker in self.agreed]
        return any(groups.count(group) == self._group_size for group in set(groups))

    def in_vain(self) -> set[int]:
        """Workers that would be waited for in vain once the model has come in: the others are on their way out."""
        present, working = self._membership.present, self._membership.working
        return (self.late & present) - self.agreed | (present - working) if self.chunks.whole else set()

    def over(self, left: set[int]) -> bool:
        """Whether all workers that still have seats have said good-bye."""
        return bool(left or self.chunks.whole) and set(self._membership.seats) <= left
