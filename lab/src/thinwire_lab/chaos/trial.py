"""One run of `thinwire train` with injected faults, resumed where a fault ended it; and its report."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.checkpoint import CheckpointStore
from thinwire.errors import CheckpointError, LostWorkersError, ThinwireError, WorkerError
from thinwire_lab.chaos.faults import Target, draw

LIMIT_S, LIMIT_PER_FAULT_S = 240.0, 15.0
"""A trial hangs if it takes longer than this limit, plus the second limit for each fault."""
LEAVE_S = 60.0
"""Workers must end within this time after their driver."""
RESUMABLE = (-9, 137, LostWorkersError.exit_code)
"""Exit codes after which a run is resumed: its driver was killed, or all workers that held its model."""
EXCUSES = {"limit": WorkerError.exit_code, "fill": CheckpointError.exit_code}
"""By fault, the exit code that it explains; the run is then resumed."""
POLL_S = 0.05


@dataclass
class Report:
    """The result of a trial."""

    arena: str
    strategy: str
    seed: int
    placement: str = "whole"
    deeds: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the beginning, and a description of each fault."""
    kills: int = 0
    resumed: int = 0
    lost: int = 0
    """Losses of workers that the runs noticed."""
    generations: int = 0
    longest_gap_s: float = 0.0
    """Longest pause between two steps of a worker without faults."""
    seconds: float = 0.0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    """Violations of what must hold."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Trial:
    """Runs one trial. The same seed draws the same faults, although their effects depend on timing."""

    def __init__(
        self,
        arena: str,
        strategy: str,
        seed: int,
        *,
        recipe: str,
        out: str,
        log: str,
        settings: list[str],
        placement: str = "whole",
        bed: Any = None,
        host: Any = None,
    ) -> None:
        self._chance = random.Random(f"{arena} {strategy} {seed}")
        self._recipe, self._out, self._log, self._settings = recipe, out, log, settings
        self._bed, self._host = bed, host
        self.report = Report(arena, strategy, seed, placement)
        self._began = time.monotonic()
        self._read = 0
        self._touched: set[int] = set()
        self._rows: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        """Rows in the checkpoint from which a run resumes."""
        self._pids: set[int] = set()
        self._excused: set[int] = set()
        """Exit codes that a fault of this run explains."""

    def play(self, *, every_s: float, most: int) -> Report:
        """Runs until the run is complete, with up to `most` faults."""
        resume = False
        while True:
            self._excused.clear()
            code = self._run(resume, every_s, most)
            if code not in (*RESUMABLE, *self._excused) or self.report.wrong:
                break
            if not self._checkpoints():
                self._start_over()
            resume = bool(self._checkpoints())
            self._floors = self._kept_rows()
            self.report.resumed += 1
        self.report.seconds = round(time.monotonic() - self._began, 1)
        if not self.report.wrong:
            self._judge(code)
        return self.report

    # -- running ----------------------------------------------------------------------------------------------------

    def _run(self, resume: bool, every_s: float, most: int) -> int:
        words = [sys.executable, "-m", "thinwire", "train", self._recipe, "--json", *self._settings]
        words += ["--resume" if resume else "--out", self._out]
        with open(self._log, "ab") as log:
            if self._bed is None:
                own = os.environ | (self._host.environment() if self._host else {})
                process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=own)
            else:
                process = self._bed.drive(words, stdout=log, stderr=log)
        target = Target(process.pid, bed=self._bed, host=self._host)
        try:
            return self._disturb(process, target, every_s, most)
        finally:
            for undo in target.undo:
                undo()
            if process.poll() is None:
                process.kill()
                process.wait(30)
            self._await_workers()

    def _disturb(self, process: Any, target: Target, every_s: float, most: int) -> int:
        due = time.monotonic() + every_s * self._chance.uniform(0.3, 1.7)
        while process.poll() is None:
            self._follow(target)
            now = time.monotonic()
            limit_s = LIMIT_S + LIMIT_PER_FAULT_S * most
            if now - self._began > limit_s:
                self.report.wrong.append(f"not over after {limit_s:.0f} s; the log is {self._log}")
                return 124
            if now >= due and len(self.report.deeds) < most and target.workers:
                self._do(target)
                due = now + every_s * self._chance.uniform(0.3, 1.7)
            time.sleep(POLL_S)
        self._follow(target)
        return int(process.returncode)

    def _do(self, target: Target) -> None:
        fault = draw(self.report.arena, self._chance)
        done = fault(target, self._chance)
        if done:
            self.report.deeds.append((round(time.monotonic() - self._began, 2), done))
            self.report.kills += done.startswith("kill")
            self._excused |= {code for word, code in EXCUSES.items() if done.startswith(word)}
            self._touched |= {worker for worker in target.workers if f"worker {worker}" in done}

    def _follow(self, target: Target) -> None:
        """Reads the run's new events."""
        path = f"{self._out}/events.jsonl"
        if not os.path.exists(path):
            return
        with open(path, "rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                with contextlib.suppress(ValueError):  # an incomplete line, from when the disk was full
                    self._see(json.loads(line), target)

    def _see(self, event: dict[str, Any], target: Target) -> None:
        kind = event["kind"]
        if kind == "worker_joined":
            target.workers[event["worker"]] = event["pid"]
            self._pids.add(event["pid"])
        elif kind == "worker_lost":
            self.report.lost += 1
            target.workers.pop(event["worker"], None)
            self._touched.add(event["worker"])
        elif kind == "generation_formed":
            self.report.generations += 1
        elif kind == "progressed":
            self._advance(event)
        elif kind == "run_started":
            self._touched.clear()
            self._rows = dict(self._floors)

    def _advance(self, event: dict[str, Any]) -> None:
        worker, rows = event["worker"], event["rows"]
        if rows < self._rows.get(worker, 0):
            self.report.wrong.append(f"worker {worker} fell from {self._rows[worker]} rows to {rows}")
        self._rows[worker] = rows
        if worker not in self._touched:
            self.report.longest_gap_s = max(self.report.longest_gap_s, round(event["gap_s"], 3))

    def _await_workers(self) -> None:
        """Checks that no worker of a run outlives it for long."""
        until = time.monotonic() + LEAVE_S
        left = self._left()
        while left and time.monotonic() < until:
            time.sleep(POLL_S)
            left = self._left()
        if left:
            self.report.wrong.append(f"processes {sorted(left)} outlived their driver by {LEAVE_S:.0f} s")
        self._pids.clear()

    def _left(self) -> set[int]:
        return {pid for pid in self._pids if _thinwire(pid)}

    # -- judging ----------------------------------------------------------------------------------------------------

    def _checkpoints(self) -> list[Any]:
        return CheckpointStore(f"{self._out}/checkpoints").manifests()

    def _kept_rows(self) -> dict[int, int]:
        """By worker, the rows in its part of the newest checkpoint."""
        store = CheckpointStore(f"{self._out}/checkpoints")
        newest = store.latest()
        if newest is None:
            return {}
        parts: dict[str, Any] = {p.name: store.read_part(newest, p.name) for p in newest.parts if "worker" in p.name}
        return {int(name.removeprefix("worker-")): int(tree["meter"]["rows"]) for name, tree in parts.items()}

    def _start_over(self) -> None:
        self.report.deeds.append((round(time.monotonic() - self._began, 2), "no checkpoint yet: from the beginning"))

    def _judge(self, code: int) -> None:
        if code != 0:
            self.report.wrong.append(f"exit code {code}; the log is {self._log}")
            return
        with open(f"{self._out}/summary.json") as found:
            summary = json.load(found)
        self.report.rows = int(summary["rows"])
        whole_epochs = abs(summary["epochs"] - round(summary["epochs"])) <= 1e-9
        grouped = self.report.placement != "whole"  # a step that a broken group left unfinished is repeated
        if not summary["complete"] or not (whole_epochs or grouped):
            self.report.wrong.append(f"{summary['rows']} rows are {summary['epochs']} epochs: {summary['reason']}")
        store = CheckpointStore(f"{self._out}/checkpoints")
        try:
            manifests = store.manifests()
            for manifest in manifests:
                for part in manifest.parts:
                    store.read_part(manifest, part.name)
            if not manifests or manifests[-1].name != summary["checkpoint"]:
                self.report.wrong.append(f"checkpoint {summary['checkpoint']} is not the newest that is whole")
        except ThinwireError as error:
            self.report.wrong.append(f"a checkpoint is damaged: {error}")


def _thinwire(pid: int) -> bool:
    """Whether a process of thinwire or Spark lives under this ID, which may belong to another process by now."""
    try:
        with open(f"/proc/{pid}/stat") as found:
            state = found.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/cmdline") as found:
            command = found.read()
            return state not in "ZX" and ("thinwire" in command or "pyspark" in command)
    except (OSError, IndexError):
        return False


def raise_if_wrong(reports: list[Report]) -> None:
    """Raises an error for the first violation, if there is any."""
    wrong = [(report, what) for report in reports for what in report.wrong]
    if wrong:
        report, what = wrong[0]
        raise WorkerError(
            f"{len(wrong)} of {len(reports)} bouts went wrong, the first: {report.strategy} ({report.arena}): {what}"
        )
