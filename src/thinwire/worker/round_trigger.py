"""What a worker has done since it last launched a round, by which its strategy says when the next is due."""

from __future__ import annotations

from typing import final

from thinwire.exchange.ports import Tree
from thinwire.strategies import Progress
from thinwire.worker.step_statistics import StepStatistics


@final
class RoundTrigger:
    """One worker's steps, seconds and losses since its last launch."""

    def __init__(self, meter: StepStatistics) -> None:
        self._meter = meter
        self.steps_then = 0
        """Steps that the worker had made when it last launched a round."""
        self._at = meter.now()
        self._loss = 0.0
        self.first_loss: float | None = None
        """Loss summed before the first launch; None until then."""

    def step(self, loss: float) -> None:
        """Books a step's loss."""
        self._loss += loss

    def start(self, steps: int) -> None:
        """Counts from here."""
        self.steps_then, self._at, self._loss = steps, self._meter.now(), 0.0

    @property
    def steps(self) -> int:
        """Steps since the last launch."""
        return self._meter.steps - self.steps_then

    def launched(self) -> None:
        """A round was launched."""
        if self.first_loss is None:
            self.first_loss = self._loss
        self.start(self._meter.steps)

    def go_on(self) -> None:
        """A round that was waited for has landed: seconds count from here, at which all workers are together."""
        self._at = self._meter.now()

    def progress(self, round: int, lead: bool) -> Progress:
        """What the strategy is asked with."""
        return Progress(
            round=round,
            steps=self._meter.steps,
            steps_since=self.steps,
            seconds_since=self._meter.now() - self._at,
            loss_since=self._loss,
            lead=lead,
            first_loss=self.first_loss,
        )

    def tree(self) -> Tree:
        return {"steps": self.steps_then, "loss": self._loss, "first_loss": self.first_loss}

    def load(self, steps: int, loss: float, first_loss: float | None) -> None:
        self.start(int(steps))
        self._loss, self.first_loss = float(loss), first_loss
