"""Distributes tests over parallel workers, marks tests that start processes, and reports failures immediately."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# pytest's workers share the processors: more threads would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of a test that asks for more wait asleep

ROOT = Path(__file__).parent
DURATIONS = ROOT / ".ci" / "durations.json"
"""Measured cost of each file; see .ci/durations.py."""
UNKNOWN_S = 10.0
"""Assumed cost of a file without a measurement."""
WITH_PROCESSES = ("tests/spark/", "tests/e2e/", "tests/security/", "tests/dashboard/", "lab/tests/")
"""Folders whose tests all count as starting processes; other tests need the marker."""
BY_FIXTURE = {"small_disk", "tiny_disk", "spark", "chromium"}
"""Fixtures that start processes, if only to mount a disk."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}


def scope_of(nodeid: str) -> str:
    """The group of tests that run on one worker: a file, or all files that share the Spark cluster."""
    file = nodeid.split("::")[0]
    return "spark" if file.startswith("tests/spark/") else file


def costs() -> dict[str, float]:
    """Seconds of processor time by scope."""
    found: dict[str, float] = {}
    if DURATIONS.exists():
        for file, row in json.loads(DURATIONS.read_text())["files"].items():
            found[scope_of(file)] = found.get(scope_of(file), 0.0) + float(row["processor_s"])
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # keeps the order of collection, see below
    return Lanes(config, log)


@pytest.hookimpl(trylast=True)  # runs after the order within files is drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that start processes; expensive files come first, so that no worker ends with one of them alone.

    The Spark cluster's tests are one scope, which takes about as long as all others: it begins first.
    """
    for item in items:
        if item.nodeid.startswith(WITH_PROCESSES) or BY_FIXTURE & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    if hasattr(config, "workerinput"):
        known = costs()
        scopes = {scope_of(item.nodeid) for item in items}
        rank = sorted(scopes, key=lambda scope: (scope != "spark", -known.get(scope, UNKNOWN_S), scope))
        place = {scope: number for number, scope in enumerate(rank)}
        items.sort(key=lambda item: place[scope_of(item.nodeid)])


class Processes:
    """Fails a test that starts a process without the marker, on which `make quick` relies."""

    def __init__(self) -> None:
        self.started: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            self.started.append(f"{event} {arguments[:2]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        self.started.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        found = yield
        if self.started and item.get_closest_marker("processes") is None:
            pytest.fail(f"it starts a process and lacks the marker 'processes': {self.started[0]}", pytrace=False)
        return found


class Told:
    """Reports why a test failed as soon as it fails, in addition to the long report at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        screen = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and screen is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = " ".join(str(crash.message if crash else report.longrepr).split())[:600]
            screen.write_line(f"\n{report.nodeid} failed ({report.when}, {report.duration:.0f} s): {why}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Told(config))
    config.pluginmanager.register(Processes())
    # a shell's background job ignores SIGINT, and programs would inherit that
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
