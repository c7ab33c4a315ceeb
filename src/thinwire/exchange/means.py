"""One-off means, such as those of buffers: which are known, and how a worker that missed a mean comes to the same.

A generation may begin when some workers have a mean and others do not. The workers that have it send it again, in place
of a contribution, so that no other mean is made of what is left.
"""

from __future__ import annotations

from thinwire.exchange.round import KNOWN, Completed, Launch
from thinwire.exchange.signals import Averaged
from thinwire.exchange.station import Station
from thinwire.parameters import Fragment
from thinwire.protocol.identifiers import FINAL, number

MOST = 4
"""Means that are kept, but for those of the end: those before them all have."""


class Means:
    """One worker's part in them."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._keys: set[str] = set()
        self._last: dict[str, Averaged] = {}

    def follow(self) -> None:
        """Takes part, with nothing, in means that others want and this worker's main thread does not."""
        for key, fragment, name in self._station.rounds.wanted():
            if self.passes_over(key):
                self._station.rounds.launch(self.aside(key, fragment, name))

    def passes_over(self, key: str) -> bool:
        """Whether the main thread has no part in a mean: it is known, or was made before the joint state came."""
        standing, publication = self._station.standing, number(key, "buffers")
        over = publication is not None and publication <= standing.published
        return standing.needs_state or key in self._keys or over

    def aside(self, key: str, fragment: Fragment, codec: str) -> Launch:
        """A part in what others want and this worker does not: the mean, where it is known, or nothing."""
        known = self._last.get(key)
        if known is None or known.mean.numel() != fragment.size:
            return Launch(key, fragment, codec, None, 0.0, self._station.note())
        notes = {str(worker): note for worker, note in known.notes.items()}
        return Launch(key, fragment, codec, known.mean.clone(), KNOWN, {"known": notes})

    def land(self, done: Completed) -> None:
        """Tells the main thread a mean that has come, with the notes that it had first."""
        self._station.rounds.land(done.key)
        told = next((note["known"] for note in done.notes.values() if "known" in note), None)
        notes = done.notes if told is None else {int(worker): dict(note) for worker, note in told.items()}
        found = Averaged(done.key, done.mean, notes, done.empty)
        self._keys.add(done.key)
        self._last[done.key] = found
        passing = [key for key in self._last if not key.endswith(f":{FINAL}")]
        for key in passing[:-MOST]:
            del self._last[key]
        self._station.signals.put(found)
