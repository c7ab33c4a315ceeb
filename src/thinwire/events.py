"""Everything that happens in a run, as frozen dataclasses; each event is a line of JSON in `events.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `time` is in seconds since 1970, on the driver's clock."""

    kind: ClassVar[str] = "event"
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """The event as one line: its kind, its time, then its own fields."""
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)}, default=str)


def made(kind: type[Event], fields: dict[str, Any]) -> Event | None:
    """An event of a kind from plain fields; None where the fields are not those of that kind."""
    try:
        return kind(**fields)
    except TypeError:
        return None


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"
    strategy: str
    knobs: dict[str, Any]
    workers: int
    rows: int | None
    """None where only the workers can count the rows."""
    validation_rows: int | None
    seed: int
    resumed_from: str | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that could not be used: reasons by name."""
    run: str = ""
    """The run's name in log records."""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    kind: ClassVar[str] = "worker_joined"
    worker: int
    attempt: int
    host: str
    pid: int
    rows: int
    again: bool = False
    """Whether the worker replaces one that was lost."""


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    kind: ClassVar[str] = "worker_lost"
    worker: int
    attempt: int
    host: str
    reason: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    kind: ClassVar[str] = "generation_formed"
    generation: int
    members: tuple[int, ...]
    reference: int
    landed: int


@dataclass(frozen=True, kw_only=True)
class RoundStalled(Event):
    """No round has landed for `seconds` while a worker waits for rounds: the same members launch them again."""

    kind: ClassVar[str] = "round_stalled"
    worker: int
    host: str
    rounds: tuple[str, ...]
    waited_for: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SlotAwaited(Event):
    """All task slots of a machine are taken, so no job can visit its workers; only with `exchange="spark"`."""

    kind: ClassVar[str] = "slot_awaited"
    executors: tuple[str, ...]
    """The machine's executors, by Spark's names."""
    host: str
    slots: int
    workers: tuple[int, ...]
    """Workers that run there."""
    others: int
    """Number of tasks of other jobs that run there."""
    seconds: float
    """Seconds since a job last visited these workers."""
    moved: int | None = None
    """The worker that was stopped there, so that Spark starts it again on a machine with a free slot."""

    @property
    def text(self) -> str:
        """The event in one line for people."""
        name = f"executor{'s' * (len(self.executors) != 1)} {', '.join(self.executors)} on {self.host}"
        taken = f"workers {list(self.workers)}"
        if self.others:
            taken += f" and {self.others} tasks of other jobs" if self.others > 1 else " and 1 task of another job"
        found = f"no slot is free on {name} for the jobs that visit its workers: {taken} take its {self.slots} slots"
        if self.moved is not None:
            return f"{found}; worker {self.moved} is started again on a machine with a free slot"
        return f"{found}, and none of them has been visited for {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class HandedOver(Event):
    """A worker gave the joint state to a peer; `digest` is the hash of the joint model after `landed` rounds."""

    kind: ClassVar[str] = "handed_over"
    worker: int
    peer: int
    landed: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Rejoined(Event):
    """A worker took the joint state over from a peer; `digest` is the hash of the model it starts from."""

    kind: ClassVar[str] = "rejoined"
    worker: int
    attempt: int
    generation: int
    landed: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """NaN or infinite values of a worker were left out of its replica, of a mean, or of what is saved."""

    kind: ClassVar[str] = "non_finite"
    worker: int
    what: str
    """"loss" or "gradient" of a step that was skipped; "contribution" or "mean" that was not counted; "parameters",
    "buffers" or "optimizer state" that the worker reset."""
    values: int
    """Number of such values, at the last occurrence."""
    times: int = 1
    """Occurrences since the worker's last such event."""
    step: int | None = None
    round: str | None = None
    by: int | None = None
    """The worker that found the values, where another worker did."""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    kind: ClassVar[str] = "progressed"
    worker: int
    attempt: int
    steps: int
    rows: int
    epoch: int
    loss: float | None
    busy: float
    gap_s: float
    """Longest pause between two steps since the worker's last event of this kind."""
    landed: int
    bytes_sent: int
    bytes_received: int = 0
    stepped_s: float = 0.0
    """Seconds that this attempt has spent stepping."""
    waited_s: float = 0.0
    """Seconds that this attempt has waited inside steps, for a round that stops the workers."""
    exchanged_s: float = 0.0
    """Seconds of this attempt during which a round was under way."""
    evaluated_s: float = 0.0
    """Seconds that this attempt has spent evaluating, between steps."""
    gradient_norm: float | None = None
    """Mean norm of the gradients of every tenth step since the worker's last event of this kind."""


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    kind: ClassVar[str] = "epoch_ended"
    worker: int
    attempt: int
    epoch: int
    rows: int
    loss: float | None
    gradient_norm: float | None = None
    """Mean norm of the gradients of every tenth step of the epoch, from the first step on."""


@dataclass(frozen=True, kw_only=True)
class RoundLanded(Event):
    kind: ClassVar[str] = "round_landed"
    round: int
    steps: int
    fragments: int
    codec: str
    seconds: float
    size_bytes: int
    contributors: tuple[int, ...]
    fragment: int = 0
    late: int | None = None
    """Steps that the worker took between snapshot and landing."""
    period: int | None = None
    """Steps between this snapshot of the fragment and the previous one."""


@dataclass(frozen=True, kw_only=True)
class SettingChanged(Event):
    kind: ClassVar[str] = "setting_changed"
    since: int
    setting: dict[str, Any]
    latency_s: float | None
    bytes_per_s: float | None
    step_s: float | None
    why: str = ""
    """The reason in one line for people."""


@dataclass(frozen=True, kw_only=True)
class Tried(Event):
    """The joint model compared with replicas, by validation loss: the mean of all replicas, the best, and one alone."""

    kind: ClassVar[str] = "tried"
    steps: int
    joint: float
    replicas: float
    best: float
    joint_there: float
    """Loss of the joint model on the rows on which the best replica was evaluated."""
    alone: float | None
    joint_beside: float | None
    """Loss of the joint model on the rows of the replica that trains alone."""
    hurts: str
    """What is worse, in words; empty where nothing is."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    kind: ClassVar[str] = "evaluated"
    number: int
    epoch: float
    steps: int
    rows: int
    metrics: dict[str, float]
    validation_rows: int
    best: bool
    left_out: int = 0
    """Validation rows in no metric: of workers that had left, were lost, or joined after the model was made."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint_saved"
    name: str
    steps: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written by a worker, or by the driver where `worker` is None; the run goes on."""

    kind: ClassVar[str] = "checkpoint_failed"
    name: str
    reason: str
    worker: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    kind: ClassVar[str] = "worker_failed"
    worker: int
    attempt: int
    host: str
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    kind: ClassVar[str] = "run_ended"
    reason: str
    summary: dict[str, Any]
