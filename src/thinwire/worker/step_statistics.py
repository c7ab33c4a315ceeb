"""A worker's own accounts: steps, rows, losses, time spent stepping, pauses between steps."""

from __future__ import annotations

import math
import time
from typing import Any

from thinwire.protocol.clock import Clock

SAMPLED = 10
"""Steps for each step whose gradient is measured: measuring costs a pass over the parameters."""


class StepStatistics:
    """Counts what a worker does; cheap enough for every step."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.now = clock
        self.steps = 0
        self.rows = 0
        self.group_rows = 0
        """Rows that the members of this worker's group had done when they last met; 0 where it has none."""
        self.position: tuple[int, int] = (0, 0)
        """Epoch and batch that come next."""
        self.step_s = 0.0
        """Smoothed duration of a step."""
        self.handling_s = 0.0
        """Smoothed duration of a snapshot and a landing of the whole vector."""
        self._epoch_rows = self._epoch_without = 0
        """Rows of the epoch, and those whose loss was not finite."""
        self._epoch_loss = 0.0
        self._busy_s = 0.0
        self._began: float | None = None
        self._last_end: float | None = None
        self._gap_s = 0.0
        self._loss_sum = 0.0
        self._loss_steps = 0
        self._waited_s = self._waited_total_s = 0.0
        self._evaluated_s = self._evaluated_since_s = 0.0
        self._exchanged_s = self._flying_since = 0.0
        self._flying = 0
        self._norms: list[float] = []
        self._epoch_norms = (0.0, 0)

    def begin_step(self) -> float:
        now = self.now()
        if self._began is None:
            self._began = now
        elif self._last_end is not None and now - self._last_end > self._gap_s:
            self._gap_s = now - self._last_end
        self._waited_s = 0.0
        return now

    def waited(self, seconds: float) -> None:
        """Takes a wait inside a step (a barrier's) out of the time spent stepping."""
        self._waited_s += seconds
        self._waited_total_s += seconds

    def evaluated(self, seconds: float) -> None:
        """Books an evaluation; its time counts with the step that follows, as time between steps."""
        if self._last_end is not None:
            self._evaluated_since_s += seconds

    def flies(self, rounds: int) -> None:
        """Notes how many rounds are under way from here on."""
        now = self.now()
        if self._flying:
            self._exchanged_s += now - self._flying_since
        self._flying, self._flying_since = rounds, now

    def handled(self, seconds: float, share: float) -> None:
        """Books what a snapshot or a landing of a share of the vector took."""
        if share > 0:
            whole = 2 * seconds / share  # a round has one snapshot and one landing
            self.handling_s = whole if not self.handling_s else 0.8 * self.handling_s + 0.2 * whole

    def end_step(self, begun: float, rows: int, loss: float, following: tuple[int, int]) -> float:
        """Books a step; returns the moment."""
        now = self.now()
        took = now - begun - self._waited_s
        self._busy_s += took
        self._evaluated_s, self._evaluated_since_s = self._evaluated_s + self._evaluated_since_s, 0.0
        self.step_s = took if not self.step_s else 0.9 * self.step_s + 0.1 * took
        self.steps += 1
        self.rows += rows
        self._epoch_rows += rows
        if math.isfinite(loss):
            self._epoch_loss += loss * rows
            self._loss_sum += loss
            self._loss_steps += 1
        else:
            self._epoch_without += rows
        self.position = following
        self._last_end = now
        return now

    @property
    def rows_done(self) -> int:
        """Rows that are in this worker's replica: its own, or those of its group."""
        return max(self.group_rows, self.rows)

    def samples_gradient(self, position: tuple[int, int]) -> bool:
        """Whether to look at the length of this step's gradient: at the first of each epoch, and now and then."""
        return position[1] % SAMPLED == 0

    def sampled_gradient(self, norm: float) -> None:
        """Books the length of a step's gradient."""
        if math.isfinite(norm):
            self._norms.append(norm)
            total, count = self._epoch_norms
            self._epoch_norms = total + norm, count + 1

    @property
    def epoch_gradient_norm(self) -> float | None:
        """Mean length of the gradients of this epoch that were looked at."""
        total, count = self._epoch_norms
        return total / count if count else None

    def end_epoch(self) -> tuple[int, float | None]:
        """Rows and mean loss of the epoch that ended."""
        rows, loss = self._epoch_rows, self._epoch_loss
        counted = rows - self._epoch_without
        self._epoch_rows, self._epoch_without, self._epoch_loss = 0, 0, 0.0
        self._epoch_norms = (0.0, 0)
        return rows, loss / counted if counted else None

    def report(self) -> dict[str, Any]:
        """What a heartbeat says; starts the next stretch of losses and pauses."""
        self.flies(self._flying)
        wall = (self._last_end or 0.0) - (self._began or 0.0)
        found = {
            "steps": self.steps,
            "rows": self.rows,
            "position": list(self.position),
            "loss": self._loss_sum / self._loss_steps if self._loss_steps else None,
            "busy": min(1.0, self._busy_s / wall) if wall > 0 else 0.0,
            "gap_s": self._gap_s,
            "stepped_s": self._busy_s,
            "waited_s": self._waited_total_s,
            "exchanged_s": self._exchanged_s,
            "evaluated_s": self._evaluated_s,
            "gradient_norm": sum(self._norms) / len(self._norms) if self._norms else None,
        }
        self._norms = []
        self._gap_s, self._loss_sum, self._loss_steps = 0.0, 0.0, 0
        return found

    def tree(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "rows": self.rows,
            "position": list(self.position),
            "epoch_rows": self._epoch_rows,
            "epoch_loss": self._epoch_loss,
            "epoch_without": self._epoch_without,
        }

    def load(self, tree: dict[str, Any]) -> None:
        self.steps, self.rows = int(tree["steps"]), int(tree["rows"])
        self.position = (int(tree["position"][0]), int(tree["position"][1]))
        self._epoch_rows, self._epoch_loss = int(tree["epoch_rows"]), float(tree["epoch_loss"])
        self._epoch_without = int(tree.get("epoch_without", 0))
