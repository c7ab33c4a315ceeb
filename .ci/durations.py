"""A pytest plugin that adds up what each test file costs: seconds of processor time and of wall time, by file.

    PYTHONPATH=.ci DURATIONS=out.json python -m pytest -p durations tests

Processor time covers the test process and every process below it, read from /proc. With pytest-xdist each lane
writes `out.json.gwN`; `python .ci/durations.py OUT PART...` joins them into one file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_s() -> float:
    """Seconds of processor time that this process and all of its descendants have used so far."""
    usage: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            usage[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family, total = {os.getpid()}, 0
    grown = True
    while grown:
        found = {pid for pid, (parent, _) in usage.items() if parent in family} - family
        family |= found
        grown = bool(found)
    for pid in family & usage.keys():
        total += usage[pid][1]
    return total / TICKS_PER_S


class Durations:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, used = time.monotonic(), processor_s()
        try:
            return (yield)
        finally:
            name = item.nodeid.split("::")[0]
            row = self.files.setdefault(name, {"tests": 0, "wall_s": 0.0, "processor_s": 0.0, "slowest": {}})
            wall_s, cpu_s = time.monotonic() - began, max(0.0, processor_s() - used)
            row["tests"] += 1
            row["wall_s"] += wall_s
            row["processor_s"] += cpu_s
            row["slowest"][item.nodeid.split("::", 1)[1]] = [round(wall_s, 1), round(cpu_s, 1)]

    def pytest_sessionfinish(self) -> None:
        lane = os.environ.get("PYTEST_XDIST_WORKER")
        if self.files:
            self.path.with_name(self.path.name + (f".{lane}" if lane else "")).write_text(json.dumps(self.files))


def pytest_configure(config: pytest.Config) -> None:  # noqa: D103
    config.pluginmanager.register(Durations(Path(os.environ["DURATIONS"]).resolve()), "durations-of-files")


def join(out: Path, parts: list[Path]) -> None:
    """Writes the files of all parts, dearest first, each with its five dearest tests."""
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, row in json.loads(part.read_text()).items():
            kept = files.setdefault(name, {"tests": 0, "wall_s": 0.0, "processor_s": 0.0, "slowest": {}})
            for key in ("tests", "wall_s", "processor_s"):
                kept[key] += row[key]
            kept["slowest"].update(row["slowest"])
    for row in files.values():
        row["wall_s"], row["processor_s"] = round(row["wall_s"], 1), round(row["processor_s"], 1)
        row["slowest"] = dict(sorted(row["slowest"].items(), key=lambda pair: -pair[1][0])[:5])
    ordered = dict(sorted(files.items(), key=lambda pair: -pair[1]["processor_s"]))
    total = {key: round(sum(row[key] for row in files.values()), 1) for key in ("tests", "wall_s", "processor_s")}
    out.write_text(json.dumps({"total": total, "files": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    join(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
