"""What a worker tells the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from thinwire.exchange.notes import Note
from thinwire.exchange.ports import ReportsPort
from thinwire.protocol import messages
from thinwire.protocol.forms import Body

REPORT_S = 0.25


@final
class Reports:
    """Messages, events and progress of one attempt.

    Args:
        worker: this worker's number.
        attempt: its attempt.
        progress: what the next heartbeat is to say; None leaves the predecessor's last word as it is.
    """

    def __init__(self, exchange: ReportsPort, worker: int, attempt: int, progress: Callable[[], Note | None]) -> None:
        self._exchange, self.worker, self.attempt, self._progress = exchange, worker, attempt, progress
        self._now, self._reported = exchange.time.now, 0.0

    def say(self, kind: Callable[..., Body], /, payload: memoryview | None = None, **fields: object) -> None:
        """Tells the coordinator something."""
        self._exchange.report(kind(attempt=self.attempt, **fields), payload)

    def event(self, kind: str, /, **fields: object) -> None:
        """Puts an event into the run's log."""
        self.say(messages.Happened, kind=kind, fields=fields)

    def report(self) -> None:
        """The next heartbeat says how far this worker is."""
        self._reported = self._now()
        progress = self._progress()
        if progress is not None:
            self._exchange.progress(progress)

    def report_if_due(self) -> None:
        """Reports, unless this worker did so a moment ago."""
        if self._now() - self._reported > REPORT_S:
            self.report()
