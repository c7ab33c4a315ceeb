"""Evaluations: workers report sums over their own validation rows, and the coordinator judges them together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from thinwire import events
from thinwire.coordinator.stopping import TRAIN_LOSS, Verdict
from thinwire.errors import DataError
from thinwire.protocol import messages

LAST_VERDICTS = 8
"""Number of verdicts that are kept for workers that join later."""
MOST_OPEN = 64
"""Publications before the newest judged one whose reports are kept; no worker lags that far behind the others."""


Compute = Callable[[dict[str, float]], dict[str, float]]
"""Computes metrics from sums over all workers' rows."""


class Judged(NamedTuple):
    """One evaluation of the joint model."""

    event: events.Evaluated
    row: dict[str, Any]
    """The row of the run's history."""
    stop: str | None
    """Why the run is to end; None where it goes on."""

    def verdict(self) -> messages.Verdict:
        """The message that tells workers of this evaluation."""
        event = self.event
        return messages.Verdict(number=event.number, best=event.best, stop=self.stop, metrics=event.metrics)


class Evaluations:
    """Collects reports by publication, and judges a publication when every worker that takes part has reported."""

    def __init__(self, law: Verdict, compute: Compute = lambda sums: {}) -> None:
        self.law, self._compute = law, compute
        self.excused: dict[int, int] = {}
        """By worker, the last publication before the worker held the joint state; it takes no part in earlier ones."""
        self._reports: dict[int, dict[int, messages.Evaluated]] = {}
        self._judged: set[int] = set()
        self._past = 0
        """Publications up to this number are judged or dropped."""
        self.verdicts: deque[messages.Verdict] = deque(maxlen=LAST_VERDICTS)

    def hear(self, worker: int, report: messages.Evaluated) -> None:
        """Takes a report in."""
        if report.number > self._past and report.number not in self._judged:
            self._reports.setdefault(report.number, {})[worker] = report

    def ready(
        self, alive: set[int], rows: dict[int, int], total_rows: int, train_loss: float | None, held: int = 0
    ) -> Iterator[Judged]:
        """Judges publications whose reports are complete; `rows` are those done by each worker, lost ones included.

        `held` is the number of validation rows of all workers together.
        """
        for number in sorted(self._reports):
            reports = self._reports.get(number, {})
            if {w for w in alive if self.excused.get(w, 0) < number} <= set(reports) and reports:
                self._close(number)
                gone = sum(done for worker, done in rows.items() if worker not in reports)
                judged = self._judge(number, reports, gone, total_rows, train_loss, held)
                self.verdicts.append(judged.verdict())
                yield judged

    def told(self, number: int) -> list[messages.Verdict]:
        """Verdicts on a publication that workers were told; empty where it is not judged."""
        return [verdict for verdict in self.verdicts if verdict.number == number]

    def _close(self, number: int) -> None:
        """Drops a publication's reports, and those of publications so old that no worker will report them."""
        del self._reports[number]
        self._judged.add(number)
        self._past = max(self._past, number - MOST_OPEN)
        self._judged = {other for other in self._judged if other > self._past}
        self._reports = {other: reports for other, reports in self._reports.items() if other > self._past}

    def _judge(
        self,
        number: int,
        reports: dict[int, messages.Evaluated],
        gone: int,
        total_rows: int,
        train_loss: float | None,
        held: int,
    ) -> Judged:
        metrics: dict[str, float] = {}
        sums: dict[str, float] = {}
        for name in sorted({name for r in reports.values() for name in r.sums}):
            weight = sum(float(r.weights.get(name, 0.0)) for r in reports.values())
            total = sum(float(r.sums.get(name, 0.0)) for r in reports.values())
            if weight > 0:
                metrics[name] = total / weight
            elif not any(name in r.weights for r in reports.values()):
                sums[name] = total
        metrics |= self._compute(sums) if sums else {}
        if not metrics and self.law.waits:
            raise DataError(
                f"{self.law.waits} is measured on validation rows, and no worker has any; hold more rows back with "
                "validation=…, or leave it out"
            )
        seen = metrics if train_loss is None else metrics | {TRAIN_LOSS: train_loss}
        best, stop = self.law.judge(seen) if metrics else (False, None)
        if best:
            self.law.note(number, metrics)
        done = gone + sum(r.done for r in reports.values())
        steps = reports[min(reports)].steps
        epoch = round(done / max(1, total_rows), 4)
        row = {"number": number, "epoch": epoch, "steps": steps, "rows": done, "train_loss": train_loss, **metrics}
        measured = sum(r.rows for r in reports.values())
        event = events.Evaluated(
            number=number,
            epoch=epoch,
            steps=steps,
            rows=done,
            metrics=metrics,
            validation_rows=measured,
            left_out=max(0, held - measured),
            best=best,
        )
        return Judged(event, row, stop)
