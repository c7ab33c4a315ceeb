"""Results of a benchmark: rows with ratios and targets, as a table, as JSON, and as a file with date and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

Say = Callable[[str], None]
"""Takes a line about the measurement in progress."""


@dataclass(frozen=True)
class Row:
    """One figure: its name, its value, its target, and the values of which it is the median."""

    part: str
    name: str
    value: float | None
    target: float | None = None
    detail: str = ""
    spread: tuple[float, ...] = ()
    at_most: bool = False
    """Whether the value must not exceed the target; otherwise it must reach the target."""
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True)
class Report:
    """A benchmark's result."""

    name: str
    rows: list[Row]
    measured: dict[str, Any]
    skipped: list[str] = field(default_factory=list)
    """Parts that could not run here, with the reason."""

    def to_json(self, command: str) -> dict[str, Any]:
        """The whole result, with date, command and machine."""
        return {
            "name": self.name,
            **about(command),
            "rows": [asdict(row) | {"met": row.met} for row in self.rows],
            "skipped": self.skipped,
            "measured": self.measured,
        }


def about(command: str) -> dict[str, Any]:
    """Date, commit, command and machine of a measurement."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "commit": _commit(), "command": command, "machine": machine()}


def _commit() -> str | None:
    """The commit of this checkout, with a "+" if its sources differ; None outside a checkout."""
    commit, *changed = (
        _git(*words) for words in (("rev-parse", "--short", "HEAD"), ("status", "-s", ":/src", ":/lab"))
    )
    return f"{commit}{'+' * any(changed)}" if commit else None


def _git(*words: str) -> str:
    try:
        place = os.path.dirname(__file__)
        done = subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Properties of this machine, and the relevant versions."""
    import numpy
    import torch
    import zmq

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load": [round(v, 2) for v in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
    }


def save(result: dict[str, Any], folder: str) -> str:
    """Writes a result to FOLDER/<name>.json; returns the path."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{result['name']}.json")
    with open(path + ".partial", "w") as file:
        file.write(json.dumps(result, indent=2) + "\n")
    os.replace(path + ".partial", path)
    return path


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
