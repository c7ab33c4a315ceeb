"""One-off means, such as those of buffers: which are known, and how whoever missed one comes to the same.

A generation may begin when some workers have a mean and others do not. Those who have it say it again, in place of a
contribution, so that nobody makes another of what is left.
"""

from __future__ import annotations

from typing import Any

from thinwire.exchange.rounds import KNOWN, Completed, Launch
from thinwire.exchange.signals import Averaged
from thinwire.parameters import Fragment
from thinwire.protocol.identifiers import FINAL

MOST = 4
"""Means that are kept, but for those of the end: those before them all have."""


class Means:
    """What one worker has of them."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._last: dict[str, Averaged] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def take(self, done: Completed) -> Averaged:
        """A mean that has come; with the notes that it had first."""
        told = next((note["known"] for note in done.notes.values() if "known" in note), None)
        notes = done.notes if told is None else {int(worker): dict(note) for worker, note in told.items()}
        found = Averaged(done.key, done.mean, notes, done.empty)
        self._keys.add(done.key)
        self._last[done.key] = found
        passing = [key for key in self._last if not key.endswith(f":{FINAL}")]
        for key in passing[:-MOST]:
            del self._last[key]
        return found

    def aside(self, key: str, fragment: Fragment, codec: str, note: dict[str, Any]) -> Launch:
        """A part in what others want and this worker does not: the mean, where it is known, or nothing."""
        known = self._last.get(key)
        if known is None or known.mean.numel() != fragment.size:
            return Launch(key, fragment, codec, None, 0.0, note)
        notes = {str(worker): note for worker, note in known.notes.items()}
        return Launch(key, fragment, codec, known.mean.clone(), KNOWN, {"known": notes})
