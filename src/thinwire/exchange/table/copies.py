"""Checkpoints of tuples: each is kept at its host, and at the worker that would take over from the host."""

from __future__ import annotations

from typing import Any

from thinwire.exchange.station import Station
from thinwire.exchange.table.log import Log
from thinwire.exchange.table.plan import Layout, Line, Plan
from thinwire.exchange.table.server import Book, Server
from thinwire.protocol.messages import Copy
from thinwire.rules.table import keeper


class Copies:
    """What one worker keeps of its own tuples and of a neighbour's."""

    def __init__(self, station: Station, layout: Layout, log_every: int) -> None:
        self._station, self._layout, self.log_every = station, layout, log_every
        self._log = Log(layout, station.trees)
        self.clear, self.kept = self._log.clear, self._log.kept

    def keep(self, key: int, book: Book, server: Server, plan: Plan | None) -> None:
        """Checkpoints a tuple, here and with the neighbour that would take over."""
        if plan is None:
            return
        mark, record = (plan.line, book.version), self._station.trees.encode(server.tree(key, book))

        def act() -> None:
            self._log.append(key, mark, record)
            self._send(key, mark, record)

        self._station.command(act)

    def _send(self, key: int, mark: Line, record: bytes) -> None:
        neighbour = keeper(self._station.worker, self._station.rounds.members)
        if neighbour != self._station.worker:
            self._station.tell(neighbour, Copy, memoryview(record), key=key, mark=mark)

    def read(self, server: int, mark: Line) -> dict[int, dict[str, Any]]:
        """The tuples of a server as a checkpoint has them."""
        return self._log.read(server, mark)

    def send_newest(self, hosted: list[int]) -> None:
        """Gives a new neighbour the last complete checkpoint of each server that is hosted here."""
        kept = self._log.kept()
        for server in hosted:
            if marks := kept.get(server):
                for key, record in self._log.raw(server, marks[-1]).items():
                    self._send(key, marks[-1], record)

    def on_copy(self, sender: int, copy: Copy, payload: memoryview | None) -> None:
        """Keeps a copy that a neighbour sent."""
        self._log.append(self._layout.key(copy.key), copy.mark, bytes(payload or b""))
