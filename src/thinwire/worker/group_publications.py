"""Publications of replicas that span several workers.

Members announce them along their lanes, and see one through together when all of them hold it. A publication's number
is that of its announcement, so that lanes agree on it. When the group that announced one is lost, some lanes may have
heard of it and others not; the members find that out when they meet, and drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from thinwire.protocol import messages
from thinwire.protocol.identifiers import checkpoint_order
from thinwire.worker.meeting import Agreed, Held, agree
from thinwire.worker.publication_schedule import Decision
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports


@final
class GroupPublications:
    """What one member announces, holds, and sees through with the others.

    Args:
        alone: whether there is no other replica.
        barrier: whether a run goes the same way each time, so that steps wait for verdicts.
    """

    def __init__(self, publisher: Publisher, reports: Reports, *, alone: Callable[[], bool], barrier: bool) -> None:
        self._publisher, self._reports, self._alone, self._barrier = publisher, reports, alone, barrier
        self._queued: list[dict[str, Any]] = []
        self._judging = 0, 0
        """The last publication whose evaluation this member reported, and how often it had caught up by then."""

    def note(self, round: int) -> dict[str, Any]:
        """What this member announces with a round along its lane."""
        note = self._publisher.announced.take_lost()
        if not note and self._queued:
            note = self._queued.pop(0)
        return self._publisher.announced.say(round, note)

    @property
    def heard(self) -> int:
        """The last publication that this member has heard of."""
        return self._publisher.number

    @property
    def said(self) -> int:
        """The last publication heard of, announced or about to be."""
        queued = max((int(note["publish"]) for note in self._queued), default=0)
        return max(self._publisher.number, self._publisher.announced.newest, queued)

    def queue(self, number: int, steps: int, due: Decision) -> None:
        """What the group has decided to publish: at once where there is one replica only, else with the next round."""
        publisher = self._publisher
        if not self._alone():
            note: dict[str, Any] = {"publish": number, "evaluate": due.evaluate}
            note |= {"save": steps} if due.save else {}
            note |= {"stop": publisher.schedule.stop_reason or "asked to"} if due.stop else {}
            self._queued.append(note)
            return
        if due.stop:
            publisher.stop()
        publisher.publish_replica(number, steps, due)

    @property
    def awaits(self) -> bool:
        """Whether a verdict has to come before the next step."""
        number, caught = self._judging
        waits = self._barrier and number not in self._publisher.evaluator.judged
        return waits and number > 0 and caught == self._publisher.num_caught_up

    @property
    def held(self) -> Held:
        """What this member says at a meeting."""
        publisher = self._publisher
        if not publisher.pending:
            return Held(publisher.number, 0, 0, 0, -1)
        first = publisher.pending[0]
        steps = -1 if first.save is None else checkpoint_order(first.save)[1]
        return Held(publisher.number, first.number, publisher.is_ready, first.evaluate, steps)

    def act(self, told: Sequence[Held]) -> Agreed:
        """Does what the members agree on; together, since evaluating takes all of them."""
        what, number = agree(told)
        publisher = self._publisher
        if what is Agreed.SEE_THROUGH:
            evaluate = any(said.evaluates for said in told)  # two groups may have announced it, each for its own reason
            alike = len({said.saves for said in told}) == 1
            publication = publisher.pending.pop(0)
            publication.evaluate, publication.save = evaluate, publication.save if alike else None
            publisher.finish(publication)
            if evaluate:
                self._judging = number, publisher.num_caught_up
        elif what is Agreed.DROP:
            if publisher.pending and publisher.pending[0].number == number:
                publisher.buffers.drop(f"buffers:{number}")
                publisher.drop(number)
            # other groups may see it through, and wait for its verdict
            self._reports.say(messages.Caught, published=number)
        return what

    def pass_over(self, last: int) -> None:
        """Publications up to this one were before the group came together."""
        publisher = self._publisher
        publisher.passed, self._judging = last, (0, 0)
        publisher.number = max(publisher.number, last)
        publisher.drop(last)
        self._queued = []
        publisher.announced.take_lost()

    def close(self, heard: int) -> None:
        """The run is over: what only some lanes have heard of by now is dropped."""
        self._publisher.drop()
        self._publisher.number = heard
