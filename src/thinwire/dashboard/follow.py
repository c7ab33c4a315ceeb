"""Reads a run's `events.jsonl` as it grows; of a long one that is there already, only as much as a picture needs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import fsspec

from thinwire.errors import ConfigError

CHUNK_BYTES = 1 << 20
FREQUENT = (b'{"kind": "progressed"', b'{"kind": "round_landed"')
"""Kinds whose fields are counters or samples: leaving some out loses no more than drawing fewer points does."""
WHOLE_BYTES = 8 << 20
"""Read in full at the end of a file; before it, frequent events are thinned out."""
KEPT = 40_000
"""Frequent events that are kept of what lies before."""
TYPICAL_BYTES = 260
MOST_LINE_BYTES = 1 << 20
"""Of one event; workers say theirs in headers of at most so many."""


class Follower:
    """One run folder's events, from the first to the newest, without waiting."""

    def __init__(self, out: str) -> None:
        self.url = f"{out.rstrip('/')}/events.jsonl"
        try:
            self._filesystem, self._path = fsspec.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{out!r} cannot be read: {error}") from None
        self._offset = 0
        self._rest = b""
        self._chance = random.Random(0)
        if not self._filesystem.exists(out if "://" in out else os.path.abspath(out)):
            raise ConfigError(f"{out!r} does not exist; name the out folder of a run")

    def new(self) -> Iterator[dict[str, Any]]:
        """Events that were written since the last time. A file that became shorter is read anew."""
        size = self._size()
        if size < self._offset:
            self._offset, self._rest = 0, b""
        if size == self._offset:
            return
        before = size - WHOLE_BYTES
        keep = min(1.0, KEPT * TYPICAL_BYTES / max(1, before - self._offset))
        with self._filesystem.open(self._path, "rb") as file:
            file.seek(self._offset)
            while self._offset < size and (chunk := file.read(min(CHUNK_BYTES, size - self._offset))):
                thin = self._offset < before and keep < 1.0
                self._offset += len(chunk)
                lines = (self._rest + chunk).split(b"\n")
                self._rest = lines.pop()
                if len(self._rest) > MOST_LINE_BYTES:
                    self._rest = b""
                yield from self._parsed(lines, keep if thin else 1.0)

    def _parsed(self, lines: list[bytes], keep: float) -> Iterator[dict[str, Any]]:
        for line in lines:
            if keep < 1.0 and line.startswith(FREQUENT) and self._chance.random() >= keep:
                continue
            if not line:
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # cut off when a driver died, or no event; what follows is whole
                continue
            if isinstance(event, dict):
                yield event

    def _size(self) -> int:
        self._filesystem.invalidate_cache()
        try:
            return int(self._filesystem.size(self._path) or 0)
        except FileNotFoundError:
            return 0
