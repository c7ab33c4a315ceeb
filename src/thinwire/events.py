"""Everything that happens in a run, as frozen dataclasses; one line of JSON each in `events.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `time` is seconds since 1970 on the driver's clock."""

    kind: ClassVar[str] = "event"
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """One line: the kind, the time, then the event's own fields."""
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)}, default=str)


def made(kind: type[Event], fields: dict[str, Any]) -> Event | None:
    """An event of a kind from plain fields; None where they are not those of its kind."""
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
    """None where only workers will know."""
    validation_rows: int | None
    seed: int
    resumed_from: str | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    """Why newer checkpoints could not be used, by name."""
    run: str = ""
    """What log records name the run by."""
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
    """Whether it takes the place of one that was lost."""


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
    """No round landed for so long while a worker waits for some: the same members launch them again."""

    kind: ClassVar[str] = "round_stalled"
    worker: int
    host: str
    rounds: tuple[str, ...]
    waited_for: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SlotAwaited(Event):
    """No job can visit the workers of a machine, whose task slots are all taken; only with `exchange="spark"`."""

    kind: ClassVar[str] = "slot_awaited"
    executors: tuple[str, ...]
    """The machine's, by Spark's names."""
    host: str
    slots: int
    workers: tuple[int, ...]
    """Those that run there."""
    others: int
    """Tasks of other jobs that run there."""
    seconds: float
    """Since the workers could be visited last."""
    moved: int | None = None
    """The worker that was ended there, so that Spark starts it again on a machine with room."""

    @property
    def text(self) -> str:
        """In one line for people."""
        name = f"executor{'s' * (len(self.executors) != 1)} {', '.join(self.executors)} on {self.host}"
        taken = f"workers {list(self.workers)}"
        if self.others:
            taken += f" and {self.others} tasks of other jobs" if self.others > 1 else " and 1 task of another job"
        found = f"no slot is free on {name} for jobs that visit its workers: {taken} take its {self.slots} slots"
        if self.moved is not None:
            return f"{found}; worker {self.moved} is started again on a machine with room"
        return f"{found}, and nobody there was heard for {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class HandedOver(Event):
    """A worker gave the joint state to a peer; `digest` is of the joint model after `landed` rounds."""

    kind: ClassVar[str] = "handed_over"
    worker: int
    peer: int
    landed: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Rejoined(Event):
    """A worker took the joint state over from a peer; `digest` is of the model it starts from."""

    kind: ClassVar[str] = "rejoined"
    worker: int
    attempt: int
    generation: int
    landed: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """Values of a worker that are NaN or infinite were left out of its replica, of a mean, or of what is saved."""

    kind: ClassVar[str] = "non_finite"
    worker: int
    what: str
    """"loss" or "gradient" of a step that was not taken; "contribution" or "mean" that was not counted; "parameters",
    "buffers" or "optimizer state" that the worker began anew."""
    values: int
    """How many, the last time."""
    times: int = 1
    """How often since the worker's last such event."""
    step: int | None = None
    round: str | None = None
    by: int | None = None
    """The worker that found it, where it was another one."""
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
    """Longest pause between two steps since the worker's last such event."""
    landed: int
    bytes_sent: int
    bytes_received: int = 0
    stepped_s: float = 0.0
    """Seconds spent stepping, by this attempt; so are the next three."""
    waited_s: float = 0.0
    """Inside steps, for a round that stops the workers."""
    exchanged_s: float = 0.0
    """In which a round was under way."""
    evaluated_s: float = 0.0
    """Between steps, evaluating."""
    gradient_norm: float | None = None
    """Mean length of the gradients of one step in ten since the worker's last such event."""


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    kind: ClassVar[str] = "epoch_ended"
    worker: int
    attempt: int
    epoch: int
    rows: int
    loss: float | None
    gradient_norm: float | None = None
    """Mean length of the gradients of one step in ten of the epoch, the first among them."""


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
    """Steps that the worker made between snapshot and landing."""
    period: int | None = None
    """Steps between this snapshot of the fragment and the one before."""


@dataclass(frozen=True, kw_only=True)
class SettingChanged(Event):
    kind: ClassVar[str] = "setting_changed"
    since: int
    setting: dict[str, Any]
    latency_s: float | None
    bytes_per_s: float | None
    step_s: float | None
    why: str = ""
    """In one line for people."""


@dataclass(frozen=True, kw_only=True)
class Tried(Event):
    """The joint model compared with replicas: mean validation losses over all of them, the best, and one alone."""

    kind: ClassVar[str] = "tried"
    steps: int
    joint: float
    replicas: float
    best: float
    joint_there: float
    """The joint model's on the rows that the best replica was looked at with."""
    alone: float | None
    joint_beside: float | None
    """On the rows of the one alone."""
    hurts: str
    """What is worse; empty where nothing is."""


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
    """Validation rows of workers that had left, were lost, or came after the model was made: they are in no metric."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint_saved"
    name: str
    steps: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, by a worker or (None) by the driver; the run goes on without it."""

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
