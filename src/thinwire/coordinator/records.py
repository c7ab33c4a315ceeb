"""What workers have reported of their steps: the last heartbeats, losses of epochs, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from thinwire import events
from thinwire.coordinator.member import Seat
from thinwire.coordinator.membership import Stalled
from thinwire.coordinator.outcome import Outcome
from thinwire.protocol.messages import Beat, Epoch

EMIT_S = 1.0


class Records:
    """Takes heartbeats and epochs in, gives events and totals out."""

    def __init__(self, emit: Callable[[events.Event], Any]) -> None:
        self._emit = emit
        self.last: dict[int, Beat] = {}
        """The last heartbeat of every worker."""
        self._emitted_at: dict[int, float] = {}
        self._unsaid: dict[int, int] = {}
        """Attempts of workers whose last heartbeat has not become an event."""
        self._newest = -1
        """The newest epoch that a worker has ended."""
        self._losses: dict[int, tuple[float, int]] = {}
        """By worker, its loss in that epoch, and the rows; a long run has too many epochs to keep them all."""
        self._latest: dict[int, tuple[float, int]] = {}
        """The same of the last epoch that each worker ended, whichever it was."""
        self._gaps: dict[int, float] = {}
        self._gone: dict[tuple[int, int], int] = {}
        """Bytes that attempts had sent when they were lost; one that is heard again tells of them itself."""

    def joined(self, seat: Seat, rows: int) -> None:
        """Tells of a worker that has joined with a number of rows."""
        self._emit(
            events.WorkerJoined(
                worker=seat.worker, attempt=seat.attempt, host=seat.host, pid=seat.pid, rows=rows, again=seat.again
            )
        )

    def beat(self, worker: int, attempt: int, beat: Beat, now: float) -> None:
        """Books a heartbeat; once in a while it becomes an event."""
        progress = beat.progress
        if not progress and worker in self._unsaid:  # a successor has yet to step: what was left unsaid is told now
            self._tell(worker)
        kept = progress or self.progress_of(worker)  # a successor has yet to tell of any
        self.last[worker] = replace(beat, progress=kept)
        self._gone.pop((worker, attempt), None)
        if not progress:
            return
        self._gaps[worker] = max(self._gaps.get(worker, 0.0), float(progress["gap_s"]))
        self._unsaid[worker] = attempt
        if now - self._emitted_at.get(worker, 0.0) >= EMIT_S:
            self._emitted_at[worker] = now
            self._tell(worker)

    def _tell(self, worker: int) -> None:
        attempt, beat = self._unsaid.pop(worker), self.last[worker]
        progress = beat.progress
        self._emit(
            events.Progressed(
                worker=worker,
                attempt=attempt,
                steps=int(progress["steps"]),
                rows=int(progress["rows"]),
                epoch=int(progress["position"][0]),
                loss=progress.get("loss"),
                busy=float(progress["busy"]),
                gap_s=self._gaps.pop(worker),
                landed=beat.landed,
                bytes_sent=beat.sent_bytes,
                bytes_received=beat.received_bytes,
                stepped_s=float(progress.get("stepped_s", 0.0)),
                waited_s=float(progress.get("waited_s", 0.0)),
                exchanged_s=float(progress.get("exchanged_s", 0.0)),
                evaluated_s=float(progress.get("evaluated_s", 0.0)),
                gradient_norm=progress.get("gradient_norm"),
            )
        )

    def on_epoch(self, worker: int, ended: Epoch) -> float | None:
        """Books a worker's epoch; returns the training loss of the newest epoch over the workers that ended it."""
        epoch, rows, loss = ended.epoch, ended.rows, ended.loss
        if loss is not None and epoch > self._newest:
            self._newest, self._losses = epoch, {}
        if loss is not None and epoch == self._newest:
            self._losses[worker] = (float(loss), rows)
        if loss is not None:
            self._latest[worker] = (float(loss), rows)
        told: dict[str, Any] = {"epoch": epoch, "rows": rows, "loss": loss, "gradient_norm": ended.gradient_norm}
        self._emit(events.EpochEnded(worker=worker, attempt=ended.attempt, **told))
        return _mean(self._losses.values())

    def train_loss(self, workers: Iterable[int]) -> float | None:
        """The training loss over the last epochs of these workers; None where one has yet to end its first."""
        found = [self._latest.get(worker) for worker in workers]
        return None if None in found else _mean([each for each in found if each is not None])

    def stalled(self, stalled: Stalled, hosts: Mapping[int, str]) -> None:
        """Tells of a worker whose rounds do not land, and for whom they wait."""
        waited_for = sorted({w for workers in stalled.waits_for.values() for w in workers})
        self._emit(
            events.RoundStalled(
                worker=stalled.worker,
                host=hosts[stalled.worker],
                rounds=tuple(stalled.waits_for),
                waited_for=tuple(waited_for),
                hosts=tuple(hosts.get(w, "?") for w in waited_for),
                seconds=round(stalled.seconds, 1),
            )
        )

    def progress_of(self, worker: int) -> dict[str, Any]:
        """What a worker's last heartbeat said of its steps; nothing where it has not told of any."""
        return self.last[worker].progress if worker in self.last else {}

    def lose(self, worker: int) -> int:
        """Keeps a lost attempt's bytes; its steps and rows are carried on by its successor. Returns its steps."""
        last = self.last.get(worker)
        if last is None:
            return 0
        if worker in self._unsaid:
            self._tell(worker)
        self._gone[worker, last.attempt] = last.sent_bytes
        self.last[worker] = replace(last, sent_bytes=0)
        return int(last.progress.get("steps", 0))

    def sum_up(self, out: Outcome, total_rows: int) -> None:
        """Writes the totals into the outcome, and tells what was not told yet; so many rows are an epoch."""
        for worker in sorted(self._unsaid):
            self._tell(worker)
        reports = list(self.last.values())
        states = [r.progress for r in reports]
        out.bytes_sent = sum(self._gone.values()) + sum(r.sent_bytes for r in reports)
        out.refused += sum(r.refused for r in reports)
        out.rounds = max((r.landed for r in reports), default=0)
        out.steps = max((int(s.get("steps", 0)) for s in states), default=0)
        out.rows = sum(int(s.get("rows", 0)) for s in states)
        out.epochs = out.rows / max(1, total_rows)
        shares = [float(s["busy"]) for s in states if s.get("steps")]
        out.busy = sum(shares) / len(shares) if shares else 0.0
        out.evaluated_s = sum(float(s.get("evaluated_s", 0.0)) for s in states) / max(1, len(shares))
        steps = [
            float(state["stepped_s"]) / int(state["steps"])
            for report, state in zip(reports, states, strict=True)
            if report.attempt == 0 and state.get("steps") and "stepped_s" in state
        ]  # a replacement reports its predecessor's steps, but only its own time
        out.step_s = sum(steps) / len(steps) if steps else None


def _mean(losses: Iterable[tuple[float, int]]) -> float | None:
    """The mean of losses by their rows."""
    pairs = list(losses)
    total = sum(rows for _, rows in pairs)
    return sum(loss * rows for loss, rows in pairs) / total if total else None
