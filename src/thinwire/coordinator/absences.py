"""Workers that were lost and have not come back."""

from __future__ import annotations


class Absences:
    """Since when each is, and whether it is still to be waited for."""

    def __init__(self, workers: int, rejoin_s: float) -> None:
        self._workers, self._rejoin_s = workers, rejoin_s
        self.since: dict[int, float] = {}
        self.never: set[int] = set()
        """Those that nobody will replace."""
        self.done: set[int] = set()
        """Those lost when all rows were done, and nothing but the end was to come."""

    @property
    def missed(self) -> set[int]:
        """Those that had rows; helpers have none."""
        return {worker for worker in self.since if worker < self._workers}

    def awaited(self, now: float) -> list[int]:
        """Those whose replacements are still on their way."""
        return [w for w, at in self.since.items() if w not in self.never and now - at < self._rejoin_s]
