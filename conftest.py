"""How tests are dealt out to processes: a file to one, all that share the Spark cluster to one.

What failed is said at once: who reads the log of a long run may have a part of it only.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "spark" if file.startswith("tests/spark/") else file

        def _assign_work_unit(self, node: Any) -> None:
            """The longest unit first, so that no lane is left alone with it at the end."""
            if "spark" in self.workqueue:
                self.workqueue.move_to_end("spark", last=False)
            super()._assign_work_unit(node)

    return Lanes(config, log)


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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
