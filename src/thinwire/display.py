"""What a person sees of a run: a live line on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.engine.coordinator import Coordinator
from thinwire.events import Evaluated, Event, SettingChanged, Tried, WorkerJoined, WorkerLost
from thinwire.job import Job


class Display:
    """A progress bar over all workers' rows, with losses as they come."""

    def __init__(self, coordinator: Coordinator, job: Job, wanted: bool | None) -> None:
        self._coordinator, self._job = coordinator, job
        self._console = Console(stderr=True)
        shown = sys.stderr.isatty() if wanted is None else wanted
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown,
            refresh_per_second=8,
        )
        self._task: Any = None
        self._shown = shown
        self._validated = ""

    def __enter__(self) -> Display:
        self._progress.start()
        self._task = self._progress.add_task("starting workers", total=self._total(), detail="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._total() is not None:
            self._progress.update(self._task, completed=self._total(), description="done")
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text)

    def see(self, event: Event) -> None:
        """Notes what deserves a line or a word."""
        if isinstance(event, Evaluated):
            self._validated = "  ".join(f"{k} {v:.4f}" for k, v in event.metrics.items())
        elif isinstance(event, WorkerLost) and self._shown:
            self._console.print(f"[yellow]worker {event.worker} lost:[/] {event.reason.splitlines()[0]}")
        elif isinstance(event, Tried) and event.hurts:
            self._console.print(f"[yellow]exchanging hurts:[/] {event.hurts}", highlight=False)
        elif isinstance(event, SettingChanged) and event.why and self._shown:
            self._console.print(f"[dim]{event.why}[/]", highlight=False)
        elif isinstance(event, WorkerJoined) and event.again and self._shown:
            self._console.print(f"worker {event.worker} is back on {event.host}")

    def turn(self) -> None:
        """Redraws from the last heartbeats."""
        if not self._shown:
            return
        states = [r.get("progress") or {} for r in self._coordinator.progress().values()]
        rows = sum(int(s.get("rows", 0)) for s in states)
        losses = [float(s["loss"]) for s in states if s.get("loss") is not None]
        detail = f"loss {sum(losses) / len(losses):.4f}" if losses else ""
        self._progress.update(
            self._task,
            completed=rows,
            total=self._total(),
            description=f"training on {len(self._coordinator.membership.members)} workers" if rows else None,
            detail=f"{detail}  {self._validated}".strip(),
        )

    def _total(self) -> float | None:
        plan = self._job.plan
        if plan.epochs is not None:
            return plan.epochs * self._coordinator.membership.total_rows or None
        if plan.steps is not None:
            return plan.steps * self._job.batch_size * self._job.workers
        return None
