"""The generation that a worker is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from thinwire.exchange.signals import Formed


@final
class Generation:
    """Its members, and the rows that each worker of the run has done, as far as this worker has heard."""

    def __init__(self) -> None:
        self.number = 0
        self.members: tuple[int, ...] = ()
        """None before the first generation has formed."""
        self.lead = False
        """Whether this worker is the first of them."""
        self.needs_state = False
        """Whether the joint state is still on its way to this worker."""
        self.total_rows = 0
        """Training rows over all workers, which make an epoch of the run."""
        self.rows: dict[int, int] = {}
        self.rows_at_round: dict[int, int] = {}
        """Rows that contributors to the last round had done when they launched it."""

    @property
    def alone(self) -> bool:
        """Whether there is no other worker to exchange with: the replica is the joint model then."""
        return len(self.members) < 2

    def begin(self, formed: Formed) -> None:
        """A generation has formed."""
        self.number, self.members, self.lead = formed.generation, formed.members, formed.lead
        self.needs_state, self.total_rows = formed.needs_state, formed.total_rows

    def hear_round(self, notes: Mapping[int, Mapping[str, Any]]) -> None:
        """A round has landed, with these notes."""
        self.rows_at_round = {worker: int(note.get("rows", 0)) for worker, note in notes.items()}
        for worker, rows in self.rows_at_round.items():
            self.hear(worker, rows)

    def hear(self, worker: int, rows: int) -> None:
        """A worker says how many rows it has done; a smaller number than before is older news."""
        self.rows[worker] = max(self.rows.get(worker, 0), rows)
