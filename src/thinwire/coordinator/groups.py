"""Workers as a grid: a group trains one replica; a lane holds the same part of all replicas.

Worker w is in group w ÷ M and lane w mod M, where M is the size of a group. A strategy exchanges along a lane, a
placement works within a group, and neither knows of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Groups:
    """The groups, and how often the members of each have connected anew (its meetings)."""

    def __init__(self, workers: int, size: int) -> None:
        self.workers, self.size = workers, size
        self._meetings: dict[int, int] = {}
        self._apart: set[int] = set()

    def group_of(self, worker: int) -> int:
        return worker // self.size

    def lane_of(self, worker: int) -> int:
        return worker % self.size

    def of(self, group: int) -> range:
        """The workers of a group."""
        return range(group * self.size, (group + 1) * self.size)

    def others_in_group(self, worker: int) -> list[int]:
        """The other workers of a worker's group."""
        if self.size == 1:
            return []
        return [other for other in self.of(self.group_of(worker)) if other != worker]

    def whole(self, present: Iterable[int]) -> set[int]:
        """The workers whose whole group is present."""
        here = set(present)
        return {worker for worker in here if here.issuperset(self.of(self.group_of(worker)))}

    def break_up(self, worker: int, meeting: int | None = None) -> bool:
        """A member is lost, or has lost the others: its group has to meet again, unless it has met since `meeting`."""
        group = self.group_of(worker)
        if meeting is not None and (group in self._apart or self._meetings.get(group) != meeting):
            return False
        self._apart.add(group)
        return True

    def form(self, members: Iterable[int]) -> None:
        """The workers of whole groups that are in a generation: groups that are broken or new meet."""
        for group in {self.group_of(worker) for worker in members}:
            if group in self._apart or group not in self._meetings:
                self._apart.discard(group)
                self._meetings[group] = self._meetings.get(group, 0) + 1

    def told(self, worker: int, meets: Mapping[int, str | None]) -> dict[str, Any] | None:
        """What a worker is told of its group: the number of its meeting, and the address where it meets."""
        if self.size == 1:
            return None
        group = self.group_of(worker)
        return {"n": self._meetings[group], "at": meets[self.of(group)[0]]}
