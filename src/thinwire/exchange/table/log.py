"""Checkpoints of tuples, appended to files that have no name: nothing is left behind, however a worker ends."""

from __future__ import annotations

import logging
import struct
import tempfile
from typing import IO, Any

from thinwire.exchange.identity import TreeCodec
from thinwire.exchange.table.plan import Layout, Line

KEPT = 3
"""Checkpoints kept of each server: of two that are being written at once, the one before is complete."""
_log = logging.getLogger("thinwire.table")
_LENGTH = struct.Struct("<IQ")


class _Segment:
    """One server's tuples at one mark, as they come."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="thinwire-table-")  # noqa: SIM115 - the log closes it
        self.keys: set[int] = set()

    def append(self, key: int, record: bytes | memoryview) -> None:
        if key in self.keys:
            return
        self._file.seek(0, 2)
        self._file.write(_LENGTH.pack(key, len(record)))
        self._file.write(record)
        self.keys.add(key)

    def records(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        self._file.seek(0)
        while head := self._file.read(_LENGTH.size):
            key, length = _LENGTH.unpack(head)
            found[key] = self._file.read(length)
        return found

    def close(self) -> None:
        self._file.close()


class Log:
    """The checkpoints that one worker keeps: of the servers it hosts, and of its neighbour's."""

    def __init__(self, layout: Layout, trees: TreeCodec) -> None:
        self._layout, self._trees = layout, trees
        self._segments: dict[int, dict[Line, _Segment]] = {}

    def append(self, key: int, mark: Line, record: bytes | memoryview) -> None:
        """Adds one tuple; the oldest checkpoints of its server go."""
        segments = self._segments.setdefault(self._layout.server_of[key], {})
        try:
            if mark not in segments:
                segments[mark] = _Segment()
            segments[mark].append(key, record)
        except OSError as error:  # no room: an older checkpoint is better than the end of the run
            _log.warning("a checkpoint of tuples could not be kept: %s", error)
            if mark in segments:
                segments.pop(mark).close()
            return
        for old in sorted(segments)[:-KEPT]:
            segments.pop(old).close()

    def kept(self) -> dict[int, list[Line]]:
        """The complete checkpoints of each server."""
        found: dict[int, list[Line]] = {}
        for server, segments in self._segments.items():
            wanted = set(self._layout.keys(server))
            found[server] = [mark for mark, segment in sorted(segments.items()) if segment.keys == wanted]
        return found

    def read(self, server: int, mark: Line) -> dict[int, dict[str, Any]]:
        """A complete checkpoint, tuple by tuple."""
        found: dict[int, dict[str, Any]] = {}
        for key, record in self.raw(server, mark).items():
            tree = self._trees.decode(record)
            assert isinstance(tree, dict)
            found[key] = tree
        return found

    def raw(self, server: int, mark: Line) -> dict[int, bytes]:
        """The same, as it was written."""
        return self._segments[server][mark].records()

    def clear(self) -> None:
        for segments in self._segments.values():
            for segment in segments.values():
                segment.close()
        self._segments = {}
