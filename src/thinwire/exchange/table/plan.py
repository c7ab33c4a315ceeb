"""Where the tuples are, and where they come from when a generation begins. Every member works out the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from thinwire.parameters import Fragment
from thinwire.rules.table import deal, hosts, last_complete, tuples

Line = tuple[int, int]
"""A checkpoint of tuples: the generation in which their line of updates began, and their version."""


class Layout:
    """Which tuples there are, by key, and the server of each."""

    def __init__(
        self,
        borders: Sequence[int],
        servers: int,
        tuple_size: int,
        first: int = 0,
        fragments: tuple[Fragment, ...] | None = None,
    ) -> None:
        size = borders[-1]
        self.servers, self.first = servers, first
        cut = tuples(borders, max(1, min(tuple_size, -(-size // servers)))) if fragments is None else fragments
        self.fragments: tuple[Fragment, ...] = cut
        self.server_of = deal([f.size for f in self.fragments], servers)

    def keys(self, server: int) -> list[int]:
        """The tuples of a server."""
        return [key for key, owner in enumerate(self.server_of) if owner == server]

    def key(self, key: int) -> int:
        """The tuple that a message is about; raises where there is no such tuple."""
        if key >= len(self.fragments):
            raise ValueError(f"there is no tuple {key}")
        return int(key)


class Answer(NamedTuple):
    """What a worker says of its servers when a generation is about to form."""

    since: int
    """The newest generation it was in; what it holds is of no use where others went on without it."""
    line: int
    live: tuple[int, ...]
    """Servers that it hosts, with all their tuples."""
    due: tuple[int, ...]
    """Servers that it hosts, some of whose tuples have yet to come."""
    still: tuple[int, ...]
    """Servers whose tuples it has sent on, and does not know to have come."""
    kept: dict[int, list[Line]]
    """Checkpoints it has of servers, its own or a neighbour's."""

    def to_json(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "line": self.line,
            "live": list(self.live),
            "due": list(self.due),
            "still": list(self.still),
            "kept": {str(server): [list(mark) for mark in marks] for server, marks in self.kept.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        kept = {int(s): [(int(line), int(version)) for line, version in marks] for s, marks in data["kept"].items()}
        live, due, still = (tuple(int(s) for s in data[name]) for name in ("live", "due", "still"))
        return cls(int(data["since"]), int(data["line"]), live, due, still, kept)


class Plan(NamedTuple):
    """How a generation's servers come by their tuples."""

    kind: Literal["live", "back", "put"]
    """All are there; or all go back to a checkpoint; or the reference puts in what it has."""
    line: int
    mark: Line | None
    """The checkpoint to go back to."""
    host: tuple[int, ...]
    """The worker of each server."""
    source: tuple[int, ...]
    """The worker that each server's tuples come from."""

    def hosted_by(self, worker: int) -> list[int]:
        """The servers that a worker hosts."""
        return [server for server, host in enumerate(self.host) if host == worker]


def plan(
    layout: Layout,
    members: Sequence[int],
    answers: Mapping[int, Answer],
    *,
    reference: int,
    generation: int,
) -> Plan:
    """The plan of a generation, from what its members answered."""
    host = hosts(layout.servers, members, layout.first)
    newest = max((answer.since for answer in answers.values()), default=0)
    heard = {worker: a for worker, a in sorted(answers.items()) if newest and a.since == newest}
    filled = [server for server in range(layout.servers) if layout.keys(server)]
    live = {server: _holders(server, heard) for server in filled}
    if heard and all(live.values()):
        source = [live[s][0] if s in live else host[s] for s in range(layout.servers)]
        return Plan("live", max(a.line for a in heard.values()), None, host, tuple(source))
    kept = {server: {mark for a in heard.values() for mark in a.kept.get(server, [])} for server in filled}
    mark = last_complete(kept.values())
    if mark is None:
        return Plan("put", generation, None, host, (reference,) * layout.servers)
    source = []
    for server in range(layout.servers):
        able = [w for w, a in heard.items() if mark in a.kept.get(server, [])]
        source.append(host[server] if host[server] in able or not able else able[0])
    return Plan("back", generation, mark, host, tuple(source))


def _holders(server: int, heard: Mapping[int, Answer]) -> list[int]:
    """Who has a server's tuples as they are now: its host, or who has sent them there while they are on their way."""
    found = [worker for worker, answer in heard.items() if server in answer.live]
    if not found and any(server in answer.due for answer in heard.values()):
        found = [worker for worker, answer in heard.items() if server in answer.still]
    return found
