"""What workers have reported of their steps: the last heartbeats, losses of epochs, and totals."""

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
    """Turns heartbeats and ended epochs into events and totals."""

    def __init__(self, emit: Callable[[events.Event], Any]) -> None:
        self._emit = emit
        self.last: dict[int, Beat] = {}
        """The last heartbeat of every worker."""
        self._emitted_at: dict[int, float] = {}
        self._unsaid: dict[int, int] = {}
        """Attempts whose last heartbeat has not become an event yet."""
        self._newest = -1
        """The newest epoch that any worker has ended."""
        self._losses: dict[int, tuple[float, int]] = {}
        """Each worker's loss in that epoch, with the number of rows; earlier epochs would take too much memory."""
        self._latest: dict[int, tuple[float, int]] = {}
        """Loss and rows of the last epoch that each worker has ended."""
        self._gaps: dict[int, float] = {}
        self._gone: dict[tuple[int, int], int] = {}
        """Bytes that lost attempts had sent; an attempt that is heard again reports its bytes itself."""

    def joined(self, seat: Seat, rows: int) -> None:
        """Emits the event of a worker that has joined."""
        self._emit(
            events.WorkerJoined(
                worker=seat.worker, attempt=seat.attempt, host=seat.host, pid=seat.pid, rows=rows, again=seat.again
            )
        )

    def beat(self, worker: int, attempt: int, beat: Beat, now: float) -> None:
        """Books a heartbeat; at most once a second it becomes an event."""
        progress = beat.progress
        # a successor has not stepped yet: emit the lost attempt's last report
        if not progress and worker in self._unsaid:
            self._tell(worker)
        kept = progress or self.progress_of(worker)  # a successor has no progress yet
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
        """The mean training loss of these workers' last epochs; None where a worker has yet to end its first epoch."""
        found = [self._latest.get(worker) for worker in workers]
        return None if None in found else _mean([each for each in found if each is not None])

    def stalled(self, stalled: Stalled, hosts: Mapping[int, str]) -> None:
        """Emits the event of a worker whose rounds do not land."""
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
        """The progress in a worker's last heartbeat; empty before the first."""
        return self.last[worker].progress if worker in self.last else {}

    def lose(self, worker: int) -> int:
        """Keeps the bytes that a lost attempt sent; its steps and rows pass to its successor. Returns its steps."""
        last = self.last.get(worker)
        if last is None:
            return 0
        if worker in self._unsaid:
            self._tell(worker)
        self._gone[worker, last.attempt] = last.sent_bytes
        self.last[worker] = replace(last, sent_bytes=0)
        return int(last.progress.get("steps", 0))

    def sum_up(self, out: Outcome, total_rows: int) -> None:
        """Emits the last reports, and writes the totals into the outcome; `total_rows` make an epoch."""
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
    """The mean of losses, weighted by rows."""
    pairs = list(losses)
    total = sum(rows for _, rows in pairs)
    return sum(loss * rows for loss, rows in pairs) / total if total else None
