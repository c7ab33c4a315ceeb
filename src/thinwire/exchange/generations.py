"""How a worker comes from one generation into the next, with nothing lost on the way.

The coordinator and the workers take turns::

1. coordinator: prepare(g)     every worker stops merging, and answers with its generation and rounds landed
2. coordinator: commit(g)      members, the reference (of the newest generation, who landed most), its count L
3. worker with both            goes on with what it had under way, among the new members
worker behind, or new       asks the reference for the joint state
4. the state arrives           it is loaded: this worker holds what all hold
"""

from __future__ import annotations

from thinwire.exchange.residuals import Residuals
from thinwire.exchange.signals import Formed
from thinwire.exchange.state_transfer import StateTransfer
from thinwire.exchange.station import Station
from thinwire.exchange.training import Forming
from thinwire.protocol.identifiers import before
from thinwire.protocol.messages import COORDINATOR, Commit, Prepare, Prepared
from thinwire.transport.ports import Link


class Generations:
    """Answers `prepare` and acts on `commit`."""

    def __init__(
        self, station: Station, forming: Forming, transfer: StateTransfer, residuals: Residuals, link: Link
    ) -> None:
        self._station, self._forming, self._transfer = station, forming, transfer
        self._residuals, self._link = residuals, link

    def prepare(self, prepare: Prepare) -> None:
        """Stops merging. What is complete counts as landed before that: no worker will launch it again."""
        standing = self._station.standing
        tuples = self._forming.prepare()
        standing.frozen = True
        answer = Prepared(
            attempt=self._station.identity.attempt,
            generation=prepare.generation,
            landed=self._station.joint.landed,
            fresh=standing.fresh or standing.needs_state,
            since=standing.since,
            digest=standing.digest,
            table=tuples,
        )
        self._station.send(COORDINATOR, answer, None)

    def commit(self, commit: Commit) -> None:
        """Goes on among the members of a generation that has formed."""
        rounds, standing, me = self._station.rounds, self._station.standing, self._station.worker
        mine = commit.members[me]
        attempts = {worker: int(entry["attempt"]) for worker, entry in commit.members.items()}
        self._link.connect({worker: entry["address"] for worker, entry in commit.members.items() if worker != me})
        standing.reference, standing.landed = commit.reference, commit.landed
        earlier = rounds.members  # none yet in a run that goes on from a checkpoint
        held = rounds.configure(commit.generation, attempts, lambda key: before(key, commit.landed))
        self._residuals.share(earlier, stale="position" in mine)  # after the sums of rounds given up are undone
        same = standing.since == commit.since and self._forming.holds(commit)
        standing.needs_state = me != commit.reference and not same
        standing.since = standing.since if standing.needs_state else commit.generation
        standing.fresh = standing.frozen = False
        if standing.needs_state:
            self._transfer.want(commit.reference)
        self._station.signals.put(self._formed(commit))
        self._forming.go_on(commit, held)
        self._transfer.answer()
        if not standing.needs_state:
            self._station.synchronised()

    def _formed(self, commit: Commit) -> Formed:
        """What the main thread is to know of the generation."""
        members, mine = self._station.rounds.members, commit.members[self._station.worker]
        return Formed(
            generation=commit.generation,
            members=members,
            lead=self._station.worker == members[0],
            needs_state=self._station.standing.needs_state,
            restart=self._forming.restarts(commit),
            position=tuple(mine["position"]) if mine.get("position") else None,
            steps=int(mine.get("steps", 0)),
            first_loss=mine.get("first_loss"),
            totals=dict(commit.totals),
            total_rows=commit.total_rows,
            group=commit.group or {},
        )
