"""How a worker's stepping thread takes up signals, and how it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from thinwire.errors import TimedOutError
from thinwire.exchange.ports import ReportsPort
from thinwire.exchange.signals import Signal
from thinwire.worker.generation import Generation
from thinwire.worker.reports import Reports

POLL_S = 0.1


@final
class Inbox:
    """Signals of the exchange thread, taken up in the order in which it saw them.

    Args:
        take: what a signal does.
        after: what follows when all signals that had come are taken up.
    """

    def __init__(
        self,
        exchange: ReportsPort,
        generation: Generation,
        reports: Reports,
        *,
        take: Callable[[Signal], None],
        after: Callable[[], None],
    ) -> None:
        self._exchange, self._generation, self._reports = exchange, generation, reports
        self._take, self._after, self._now = take, after, exchange.time.now
        self.patient_until = 0.0
        """A moment before which nothing that is waited for is late."""

    def take_signals(self, timeout_s: float) -> None:
        """Takes up what has come, after waiting at most `timeout_s` for the first signal."""
        for signal in self._exchange.signals(timeout_s):
            self._take(signal)
        self._after()

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float) -> None:
        """See `thinwire.worker.ports.Wait`."""
        deadline = self._now() + timeout_s
        while not until():
            self.take_signals(POLL_S)
            self._reports.report_if_due()
            if self._now() > max(deadline, self.patient_until):
                raise TimedOutError(
                    f"worker {self._reports.worker} waited {timeout_s:.0f} s for {what} with workers "
                    f"{list(self._generation.members)}; look for a worker that hangs, or raise the deadline"
                )
