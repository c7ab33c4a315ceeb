"""Parts of checkpoints on their way to a store, beside the steps.

A part that cannot be written is told of, and training goes on: an older checkpoint is better than the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING, Any

from thinwire.checkpoint.finite import why_not_finite
from thinwire.errors import CheckpointError
from thinwire.protocol import messages

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker

MOST_WAITING = 4
"""Checkpoints that may wait for a slow store; each is a copy of the model."""
MOST_BEGUN = 2
"""Where so many wait at the worker that decides, it announces no further one: others' would never be whole."""

SavePart = Callable[[str, str, object], Any]


class CheckpointWriter:
    """Writes one worker's parts, in the order in which they were given."""

    def __init__(self, worker: Worker, save_part: SavePart | None) -> None:
        self._worker, self._save_part = worker, save_part
        self._io = worker.time.executor("checkpoint")
        self._writes: dict[Future[None], str] = {}

    def write(self, name: str, trees: dict[str, object], *, last: bool = False) -> None:
        """Begins to write a checkpoint's parts, unless earlier ones are still being written."""
        if self._save_part is None:
            return
        self._writes = {write: of for write, of in self._writes.items() if not write.done() or write.result()}
        if len(self._writes) >= MOST_WAITING and not last:
            self.skip(name)
            return
        self._writes[self._io.submit(self._write, name, trees, self._told())] = name

    @property
    def busy(self) -> bool:
        """Whether a further one had better not be announced."""
        return sum(not write.done() for write in self._writes) >= MOST_BEGUN

    def skip(self, name: str) -> None:
        """Tells of one that is not written because others still are."""
        self._failed(name, "earlier ones are still being written: the store is slow")

    def finish(self, patience_s: float) -> None:
        """Waits for what was begun, within reason."""
        deadline = self._worker.time.now() + patience_s
        for write, name in self._writes.items():
            try:
                write.result(timeout=max(0.0, deadline - self._worker.time.now()))
            except LateError:
                self._failed(name, f"it was not written after {patience_s:.0f} s: the store is slow")

    def close(self) -> None:
        """Nothing more is to be written; what is still being is not waited for."""
        self._io.shutdown(wait=all(write.done() for write in self._writes), cancel_futures=True)

    def _told(self) -> dict[str, Any]:
        """What is said of a checkpoint when this worker's parts are written."""
        return {"steps": self._worker.meter.steps, "fails": self._worker.nonfinite.now_fails}

    def _write(self, name: str, trees: dict[str, object], told: dict[str, Any]) -> None:
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
        self._worker.say(messages.Saved, name=name, parts=parts, **told)

    def _failed(self, name: str, reason: str) -> None:
        self._worker.event("checkpoint_failed", worker=self._worker.plan.worker, name=name, reason=reason)
