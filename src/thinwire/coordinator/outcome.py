"""What a run was asked to do, and what came of it, as far as the coordinator knows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from thinwire import events
from thinwire.coordinator.evaluations import Compute
from thinwire.coordinator.stopping import EarlyStopping, Target
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.identifiers import FINAL, checkpoint_order

_log = logging.getLogger("thinwire.coordinator")
LEFT_OUT = "evaluation %s is of %s validation rows; %s are left out: their workers had left, were lost, or came late"
LAST_UNWRITTEN, LAST_WARNINGS = 8, 8


@dataclass
class Policy:
    """The settings of a run that the coordinator decides by."""

    workers: int
    helpers: int = 0
    """Members without rows beside the workers; their numbers come after the workers'."""
    stop: EarlyStopping | None = None
    until: Target | None = None
    seconds: float | None = None
    """Seconds of training after which the run ends."""
    epochs: int | None = None
    """Epochs that each worker is to have done at the end, where workers go on past theirs while others lag behind."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    compute: Compute = field(default=lambda sums: {})
    """Computes metrics from sums over all workers' rows."""
    min_workers: int = 1
    group_size: int = 1
    """Workers that one replica spans."""


@dataclass
class Outcome:
    """The results of a run."""

    reason: str = ""
    stopped_early: bool = False
    interrupted: bool = False
    results: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """The trained model, by part of a replica, in chunks."""
    metrics: dict[str, float] = field(default_factory=dict)
    validation_rows: int = 0
    """Validation rows of the last evaluation."""
    left_out: int = 0
    """Validation rows that the last evaluation lacked."""
    warned_of: int = 0
    """Most validation rows that an evaluation has lacked so far; an evaluation that lacks more causes a warning."""
    best_evaluation: int | None = None
    """Number of the best evaluation, by the metric of early stopping or else the validation loss."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    workers_lost: int = 0
    unreplaced: set[int] = field(default_factory=set)
    """Workers whose rows no replacement has taken over."""
    generations: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    refused: int = 0
    steps: int = 0
    rows: int = 0
    epochs: float = 0.0
    busy: float = 0.0
    evaluated_s: float = 0.0
    """Seconds that a worker has spent evaluating between its steps; the mean over workers."""
    step_s: float | None = None
    """Mean seconds of a step over the workers that were never replaced."""
    train_s: float = 0.0
    checkpoint: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    choice: str = ""
    """Why the exchange has its present setting."""
    warnings: list[str] = field(default_factory=list)
    """The last few warnings that exchanging hurts."""
    obstacle: str = ""
    """Why workers could not be visited, where the cluster knows."""
    nonfinite: int = 0
    """How often values that are not finite were left out."""
    flawed: dict[int, events.NonFinite] = field(default_factory=dict)
    """The last event of this kind of each worker."""
    unwritten: dict[str, str] = field(default_factory=dict)
    """The last few checkpoints that could not be written: reasons by name."""

    def record(self, event: events.Event) -> events.Event:
        """Keeps what the summary of the run needs from an event, and returns the event."""
        if isinstance(event, events.SettingChanged):
            self.choice = event.why or self.choice
        elif isinstance(event, events.Tried) and event.hurts:
            self.warnings = [*self.warnings, event.hurts][-LAST_WARNINGS:]
        elif isinstance(event, events.Evaluated):
            if event.metrics or not self.metrics:  # an evaluation without rows keeps the last metrics
                self.metrics, self.validation_rows, self.left_out = event.metrics, event.validation_rows, event.left_out
            if event.left_out > self.warned_of:  # a worker may be away for many evaluations
                _log.warning(LEFT_OUT, event.number, event.validation_rows, event.left_out)
            self.warned_of = event.left_out
        elif isinstance(event, events.SlotAwaited):
            self.obstacle = event.text
            _log.warning("%s", event.text)
        elif isinstance(event, events.NonFinite):
            self.nonfinite += event.times
            self.flawed[event.worker] = event
        elif isinstance(event, events.CheckpointSaved):
            self.checkpoint = event.name
        elif isinstance(event, events.CheckpointFailed):
            self.unwritten[event.name] = event.reason
            if len(self.unwritten) > LAST_UNWRITTEN:
                self.unwritten.pop(next(iter(self.unwritten)))
        return event

    @property
    def unsaved(self) -> str | None:
        """Why the newest checkpoint could not be written; None where it was written."""
        newest = max(self.unwritten, key=checkpoint_order, default="")
        # A checkpoint that was never begun has the number of the next one.
        compared = None if newest.endswith(FINAL) else 1
        if checkpoint_order(newest)[:compared] <= checkpoint_order(self.checkpoint or "")[:compared]:
            return None
        return f"checkpoint {newest} was not saved: {self.unwritten[newest]}"

    def note_missing(self, workers: set[int]) -> None:
        """Sets the reason of the run's end, if none is set; `workers` have rows that are not done."""
        if workers and not self.stopped_early:
            self.unreplaced.update(workers)
        lost = f"not all rows done: workers {sorted(self.unreplaced)} never came, or were lost and not replaced"
        self.reason = self.reason or (lost if self.unreplaced else "all rows done")

    def last_good(self) -> str:
        """The last good checkpoint, in words, for errors about a loss that is not finite."""
        if self.checkpoint is None:
            return ". No checkpoint had been written; try a smaller learning rate or gradient clipping."
        return (
            f". The last good checkpoint is {self.checkpoint}: resume from it with a smaller learning "
            "rate or gradient clipping."
        )
