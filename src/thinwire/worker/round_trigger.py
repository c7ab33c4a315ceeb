"""What a worker has done since it last launched a round, by which its strategy says when the next is due."""

from __future__ import annotations

from typing import Any

from thinwire.protocol.clock import Clock
from thinwire.strategies import Progress
from thinwire.worker.step_statistics import StepStatistics


class Pace:
    """One worker's steps, seconds and losses since its last launch."""

    def __init__(self, meter: StepStatistics, clock: Clock) -> None:
        self._meter, self._clock = meter, clock
        self.steps = 0
        """Steps it had made then."""
        self._at = self._clock()
        self._loss = 0.0
        self.first_loss: float | None = None
        """Loss summed before its first launch; None until then."""

    def step(self, loss: float) -> None:
        """Books a step's loss."""
        self._loss += loss

    def start(self, steps: int) -> None:
        """Counts from here."""
        self.steps, self._at, self._loss = steps, self._clock(), 0.0

    def launched(self) -> None:
        """A round was launched."""
        if self.first_loss is None:
            self.first_loss = self._loss
        self.start(self._meter.steps)

    def go_on(self) -> None:
        """A round that was waited for has landed: seconds count from here, at which all workers are together."""
        self._at = self._clock()

    def progress(self, round: int, lead: bool) -> Progress:
        """What the strategy is asked with."""
        return Progress(
            round=round,
            steps=self._meter.steps,
            steps_since=self._meter.steps - self.steps,
            seconds_since=self._clock() - self._at,
            loss_since=self._loss,
            lead=lead,
            first_loss=self.first_loss,
        )

    def tree(self) -> dict[str, Any]:
        return {"steps": self.steps, "loss": self._loss, "first_loss": self.first_loss}

    def load(self, tree: dict[str, Any]) -> None:
        self.start(int(tree["steps"]))
        self._loss, self.first_loss = float(tree["loss"]), tree["first_loss"]
