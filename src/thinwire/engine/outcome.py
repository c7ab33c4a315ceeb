"""What a run was asked to do, and what it came to, as far as the coordinator is concerned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thinwire.engine.deadlines import Deadlines
from thinwire.engine.stopping import EarlyStopping, Target


@dataclass
class Policy:
    """What the run was asked to do, as far as the coordinator decides it."""

    workers: int
    helpers: int = 0
    """Members without rows beside the workers; their numbers come after the workers'."""
    stop: EarlyStopping | None = None
    until: Target | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    min_workers: int = 1


@dataclass
class Outcome:
    """What a run came to."""

    reason: str = ""
    stopped_early: bool = False
    interrupted: bool = False
    result: bytes | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    workers_lost: int = 0
    unreplaced: int = 0
    """Workers whose rows nobody took over."""
    generations: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    refused: int = 0
    steps: int = 0
    rows: int = 0
    epochs: float = 0.0
    busy: float = 0.0
    train_s: float = 0.0
    checkpoint: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def last_good(self) -> str:
        """Where to go on from after a loss that is not finite."""
        if self.checkpoint is None:
            return ". No checkpoint had been written; try a smaller learning rate or gradient clipping."
        return (
            f". The last good checkpoint is {self.checkpoint}: resume from it with a smaller learning "
            "rate or gradient clipping."
        )
