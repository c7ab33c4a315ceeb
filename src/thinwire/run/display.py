"""What a person sees of a run: a live bar on a terminal or in a notebook, lines now and then in a log file."""

from __future__ import annotations

import importlib
import sys
import time
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.coordinator.coordinator import Coordinator
from thinwire.events import (
    CheckpointFailed,
    Evaluated,
    Event,
    RunEnded,
    SettingChanged,
    Tried,
    WorkerJoined,
    WorkerLost,
)
from thinwire.run.job import Job

LINE_S = 10.0
"""Between two lines of a log."""
NOTEBOOK_S = 0.5
BAR_CELLS = 24


class State(NamedTuple):
    """What there is to show now."""

    phase: str
    rows: int
    total: float | None
    detail: str
    before: int = 0
    """Rows that an earlier run had done."""

    def text(self, seconds: float) -> str:
        """In one line of plain text."""
        share = f"{min(1.0, self.rows / self.total):4.0%}" if self.total else f"{self.rows:,} rows"
        done = self.rows - self.before
        rate = f"{done / seconds:,.0f} rows/s" if done > 0 and seconds > 0 else ""
        return "  ".join(filter(None, (f"{seconds:6.0f} s", share, self.phase, self.detail, rate)))


class Face(Protocol):
    """One way of showing it."""

    def show(self, state: State) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self, state: State) -> None: ...


class Bar:
    """A bar that moves, on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=8,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=None, detail="")

    def show(self, state: State) -> None:
        self._progress.update(
            self._task, completed=state.rows, total=state.total, description=state.phase, detail=state.detail
        )

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self, state: State) -> None:
        self.show(state)
        self._progress.stop()


class Lines:
    """A line every ten seconds, and whenever another phase begins: for logs."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told, self._phase = -LINE_S, ""

    def show(self, state: State) -> None:
        seconds = time.monotonic() - self._began
        if state.phase != self._phase or seconds - self._told >= LINE_S:
            self._told, self._phase = seconds, state.phase
            self.say(state.text(seconds))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self, state: State) -> None:
        self._phase = ""
        self.show(state)


class Notebook:
    """One output of a cell that is replaced as the run goes on, and lines below it."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._began = self._told = time.monotonic()
        self._handle: Any = display({"text/plain": "starting"}, raw=True, display_id=True)

    def show(self, state: State) -> None:
        if time.monotonic() - self._told >= NOTEBOOK_S:
            self._draw(state)

    def _draw(self, state: State) -> None:
        self._told = time.monotonic()
        full = round(BAR_CELLS * min(1.0, state.rows / state.total)) if state.total else 0
        bar = f"{'█' * full}{'·' * (BAR_CELLS - full)} " if state.total else ""
        self._handle.update({"text/plain": bar + state.text(self._told - self._began)}, raw=True)

    def say(self, text: str) -> None:
        print(text)

    def close(self, state: State) -> None:
        self._draw(state)


def face_for(wanted: bool | None) -> Face | None:
    """What fits where this process's messages go; in a log file only what was asked for."""
    if wanted is False:
        return None
    if _in_notebook():
        return Notebook()
    if sys.stderr.isatty():
        return Bar()
    return Lines() if wanted else None


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running: Any = None if shell is None else shell.get_ipython()
    return running is not None and hasattr(running, "kernel")


class Display:
    """Follows a run, from its workers' start to its end."""

    def __init__(self, coordinator: Coordinator, job: Job, wanted: bool | None) -> None:
        self._coordinator, self._job = coordinator, job
        self._face = face_for(wanted)
        self._validated = ""
        self._best: int | None = None
        self._before: int | None = None

    def __enter__(self) -> Display:
        self.turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._face is not None:
            self._face.close(self._state()._replace(phase="done" if kind is None else "stopped"))

    def say(self, text: str) -> None:
        """Says something, whatever is shown."""
        if self._face is not None:
            self._face.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def see(self, event: Event) -> None:
        """Notes what deserves a line or a word."""
        if isinstance(event, Evaluated):
            self._best = event.number if event.best else self._best
            self._validated = "  ".join(f"{k} {v:.4f}" for k, v in event.metrics.items())
            if self._best is not None:
                kept = ", given back" if self._job.plan.keeps_best else ""
                self._validated += f"  (best: evaluation {self._best}{kept})"
        elif isinstance(event, Tried) and event.hurts:
            self.say(f"exchanging hurts: {event.hurts}")
        elif isinstance(event, CheckpointFailed):
            self.say(f"checkpoint {event.name} was not saved: {event.reason}")
        elif self._face is None or isinstance(event, RunEnded):
            return
        elif isinstance(event, WorkerLost):
            self.say(f"worker {event.worker} lost: {event.reason.splitlines()[0]}")
        elif isinstance(event, SettingChanged) and event.why:
            self.say(event.why)
        elif isinstance(event, WorkerJoined) and event.again:
            self.say(f"worker {event.worker} is back on {event.host}")

    def turn(self) -> None:
        """Redraws from the last heartbeats."""
        if self._face is not None:
            self._face.show(self._state())

    def _state(self) -> State:
        states = [beat.progress for beat in self._coordinator.records.last.values()]
        rows = sum(int(s.get("rows", 0)) for s in states)
        losses = [float(s["loss"]) for s in states if s.get("loss") is not None]
        loss = f"loss {sum(losses) / len(losses):.4f}" if losses else ""
        members = len(self._coordinator.membership.agreement.members)
        number = "1 worker" if members == 1 else f"{members} workers"
        phase = f"training on {number}" if rows else "reading rows, starting workers"
        if rows and self._before is None:
            self._before = rows if self._job.resume is not None else 0
        return State(phase, rows, self._total(), "  ".join(filter(None, (loss, self._validated))), self._before or 0)

    def _total(self) -> float | None:
        plan = self._job.plan
        if plan.epochs is not None:
            return plan.epochs * self._coordinator.membership.roster.total_rows or None
        if plan.steps is not None:
            return plan.steps * self._job.batch_size * self._job.workers
        return None
