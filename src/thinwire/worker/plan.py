"""What one worker is to do, as plain values that travel to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from thinwire.protocol.deadlines import Deadlines


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """A worker's orders.

    Args:
        worker: its number.
        attempt: larger than that of any process that had this number before.
        epochs: passes over its shard; None with `steps`.
        steps: optimizer steps at most.
        evaluates: whether there are validation rows anywhere.
        evaluate_every: steps of the first worker between evaluations; None evaluates once an epoch.
        checkpoint_every: steps of the first worker between checkpoints; "auto" at epochs, not too often.
        keeps_best: whether the best joint model is kept for the end.
        codec: the exchange's own codec, for strategies that choose none.
        deadlines: how long it waits for anything.
        group_size: workers that one replica spans.
        seconds: of training, for schedules that follow the run; the coordinator ends it.
        beyond: the number of workers with whom it goes on past its epochs while others lag behind; None stops there.
        shows: whether the driver is sent the joint model of each evaluation.
        on_nonfinite: whether a step whose loss or gradient is not finite is left out, or ends the run.
    """

    worker: int
    attempt: int
    epochs: int | None
    steps: int | None
    evaluates: bool
    evaluate_every: int | None = None
    checkpoint_every: int | Literal["auto"] | None = None
    keeps_best: bool = False
    codec: str = "float32"
    deadlines: Deadlines = field(default_factory=Deadlines)
    group_size: int = 1
    seconds: float | None = None
    beyond: int | None = None
    shows: bool = False
    on_nonfinite: Literal["drop", "stop"] = "drop"
