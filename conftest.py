"""How tests are dealt out to lanes, which of them start processes, and what is said of a failure when it happens."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # lanes share the processors: more threads would wait for each other
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and where a test asks for more, they wait asleep

ROOT = Path(__file__).parent
DURATIONS = ROOT / ".ci" / "durations.json"
"""What each file cost when that was last measured; see .ci/durations.py."""
UNKNOWN_S = 10.0
"""What a file is taken to cost that is not among them."""
WITH_PROCESSES = ("tests/spark/", "tests/e2e/", "tests/security/", "tests/dashboard/", "lab/tests/")
"""Folders whose tests all count as starting processes; elsewhere a test says so by a marker of its own."""
BY_FIXTURE = {"small_disk", "tiny_disk", "spark", "chromium"}
"""Fixtures that start some, if only to mount a disk."""
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}


def scope_of(nodeid: str) -> str:
    """What goes to one lane together: a file, or all that share the Spark cluster."""
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

    config.option.loadscopereorder = False  # the order is that of collection, see below
    return Lanes(config, log)


@pytest.hookimpl(trylast=True)  # after the order within files was drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what starts processes; in a lane the dearest files come first, so that no lane ends on one alone.

    The Spark cluster's tests are one scope and take a lane for as long as anything: they begin at once.
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
    """Fails a test that starts a process and does not say so: `make quick` counts on the marker."""

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
    """Says why a test failed when it fails, beside the long report at the end."""

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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
