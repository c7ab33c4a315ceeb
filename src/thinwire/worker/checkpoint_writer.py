"""Parts of checkpoints on their way to a store, beside the steps.

A part that cannot be written is reported, and training goes on: an older checkpoint is better than the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import final

from thinwire.checkpoint import Part
from thinwire.checkpoint.finite import why_not_finite
from thinwire.errors import CheckpointError
from thinwire.protocol import messages
from thinwire.protocol.clock import Time
from thinwire.worker.reports import Reports
from thinwire.worker.step_statistics import StepStatistics

MOST_WAITING = 4
"""Checkpoints that may wait for a slow store; each is a copy of the model."""
MOST_BEGUN = 2
"""Checkpoints waiting at the first worker beyond which it announces no further one: it would never be whole."""

SavePart = Callable[[str, str, object], Part]
"""Writes a part, given the names of checkpoint and part, and what it holds."""


@final
class CheckpointWriter:
    """Writes one worker's parts, in the order in which they were given.

    Args:
        save_part: writes a part to the store; None where nothing is saved.
        fails: whether this worker's last few steps were left out.
    """

    def __init__(
        self,
        save_part: SavePart | None,
        reports: Reports,
        meter: StepStatistics,
        time: Time,
        *,
        fails: Callable[[], bool],
    ) -> None:
        self._save_part, self._reports, self._meter, self._time, self._fails = save_part, reports, meter, time, fails
        self._io = time.executor("checkpoint")
        self._writes: dict[Future[None], str] = {}

    def write(self, name: str, trees: dict[str, object], *, last: bool = False) -> None:
        """Begins to write a checkpoint's parts, unless earlier ones are still being written."""
        if self._save_part is None:
            return
        self._writes = {write: of for write, of in self._writes.items() if not write.done() or write.result()}
        if len(self._writes) >= MOST_WAITING and not last:
            self.skip(name)
            return
        self._writes[self._io.submit(self._write, name, trees, self._meter.steps, self._fails())] = name

    @property
    def busy(self) -> bool:
        """Whether the store is too slow for a further checkpoint to be announced."""
        return sum(not write.done() for write in self._writes) >= MOST_BEGUN

    def skip(self, name: str) -> None:
        """Reports a checkpoint that is not written because others still are."""
        self._failed(name, "earlier ones are still being written: the store is slow")

    def finish(self, patience_s: float) -> None:
        """Waits for the parts that are being written, for as long as the patience lasts."""
        deadline = self._time.now() + patience_s
        for write, name in self._writes.items():
            try:
                write.result(timeout=max(0.0, deadline - self._time.now()))
            except LateError:
                self._failed(name, f"it was not written after {patience_s:.0f} s: the store is slow")

    def close(self) -> None:
        """Nothing more is to be written; parts that are still being written are not waited for."""
        self._io.shutdown(wait=all(write.done() for write in self._writes), cancel_futures=True)

    def _write(self, name: str, trees: dict[str, object], steps: int, fails: bool) -> None:
        assert self._save_part is not None
        parts = []
        for part, tree in trees.items():
            if isinstance(tree, dict) and (unfit := why_not_finite(tree)):
                self._failed(name, unfit)
                return
            try:
                written = self._save_part(name, part, tree)
            except CheckpointError as error:
                self._failed(name, str(error))
                return
            parts.append({"name": part, "size_bytes": written.size_bytes, "digest": written.digest})
        self._reports.say(messages.Saved, name=name, parts=parts, steps=steps, fails=fails)

    def _failed(self, name: str, reason: str) -> None:
        self._reports.event("checkpoint_failed", worker=self._reports.worker, name=name, reason=reason)
