"""Publications of replicas that span several workers: members announce them along their lanes, and see them through
together when all of them hold the same one.

A publication's number is that of its announcement, so that lanes agree on it. When the group that announced one is
lost, some lanes may have heard of it and others not; the members find that out when they meet, and drop it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from thinwire.exchange.signals import Missed, Published
from thinwire.protocol import messages
from thinwire.protocol.identifiers import checkpoint_name, checkpoint_order
from thinwire.worker.publisher import Publisher

if TYPE_CHECKING:
    from thinwire.worker.group_worker import GroupWorker


class Held(NamedTuple):
    """What one member says of publications at a meeting."""

    heard: float
    """The number of the last one that it has heard of."""
    pending: float
    """The number of the first one that it has yet to see through; 0 for none."""
    ready: float
    """Whether it could see that one through now."""
    evaluates: float
    saves: float
    """The steps in the checkpoint's name; below 0 for none."""


class Agreed(enum.Enum):
    """What members do next about publications."""

    NOTHING = "no member holds one"
    WAIT = "all hold the same one, and not all are ready"
    SEE_THROUGH = "all hold the same one, and are ready"
    UNHEARD = "some hold one that others may still hear of"
    DROP = "some hold one that others never will hear of"


def agree(told: Sequence[Held]) -> tuple[Agreed, int]:
    """What to do next, and with which publication; the same on all members, since all are told the same.

    >>> agree([Held(3, 3, 1, 1, -1), Held(3, 3, 0, 1, -1)])
    (<Agreed.WAIT: 'all hold the same one, and not all are ready'>, 3)
    >>> agree([Held(3, 3, 1, 1, -1), Held(2, 0, 0, 0, -1)])
    (<Agreed.UNHEARD: 'some hold one that others may still hear of'>, 3)
    >>> agree([Held(4, 3, 1, 1, -1), Held(4, 4, 1, 1, -1)])
    (<Agreed.DROP: 'some hold one that others never will hear of'>, 3)
    """
    first = min((int(said.pending) for said in told if said.pending), default=0)
    if not first:
        return Agreed.NOTHING, 0
    lacking = [said for said in told if said.pending != first]
    if not lacking:
        return (Agreed.SEE_THROUGH if all(said.ready for said in told) else Agreed.WAIT), first
    return (Agreed.DROP if all(said.heard >= first for said in lacking) else Agreed.UNHEARD), first


class GroupPublisher(Publisher):
    """Publications that the members of a group see through together; each announces them along its lane."""

    def __init__(self, worker: GroupWorker, *args: Any) -> None:
        super().__init__(worker, *args)
        self._member = worker
        self.part = worker.plan.worker % worker.plan.group_size
        self.joint_name = "joint" if not self.part else f"joint-{self.part}"
        self._queued: list[dict[str, Any]] = []
        self._over = 0
        self._judging = 0, 0
        """The last publication whose evaluation this member reported, and what it counted of states that came then."""
        self._ready: tuple[int, dict[str, Tensor] | None] = (0, None)
        """The publication that this member last spoke of, and the buffers that it said it had for it."""

    def note(self, round: int) -> dict[str, Any]:
        note, self._again = self._again, {}
        if not note and self._queued:
            note = self._queued.pop(0)
        if note:
            self._announced[round] = note = self.announced.add(note)
        return note

    @property
    def said(self) -> int:
        """The last publication heard of, announced or about to be."""
        notes = [*self._announced.values(), *self._queued, *([self._again] if self._again else [])]
        return max([self.number, *(int(note["publish"]) for note in notes)])

    def hear(self, signal: Published | Missed) -> None:
        super().hear(signal)
        if not self.announced:  # of all that was announced here, outside of rounds too, nothing is left to come
            self._announced.clear()

    def queue(self, number: int, steps: int, evaluate: bool, save: bool, stop: bool) -> None:
        """What the group has decided to publish: at once where there is one replica only, else with the next round."""
        note: dict[str, Any] = {"publish": number, "evaluate": evaluate}
        note |= {"save": steps} if save else {}
        note |= {"stop": self.asked_to_stop or "asked to"} if stop else {}
        if not self._member.alone:
            self._queued.append(note)
            return
        if stop:
            self._member.stop()
        model = self._vector()
        self._member.joint.set_model(model)
        if evaluate or save:
            name = checkpoint_name(number, steps) if save else None
            self._publish(number, model, self._member.joint.tree() if save else None, name, evaluate)

    def take_up(self, note: dict[str, Any], model: Tensor, joint: dict[str, Any] | None) -> None:
        """Takes up a publication under its announced number; one that two groups announced is taken up once."""
        if "stop" in note:
            self._worker.stop()
        number, steps = int(note["publish"]), note.get("save")
        if number <= self.number:  # heard of after a later one, or twice: others may want its buffers all the same
            self._buffers.ask(f"buffers:{number}")
        else:
            save = None if steps is None else checkpoint_name(number, int(steps))
            self._publish(number, model, joint, save, bool(note.get("evaluate")))

    def resume(self) -> None:
        return  # at the group's next meeting

    def _await_verdict(self, number: int, evaluate: bool) -> None:
        return  # members go on meeting until they have it

    @property
    def awaits(self) -> bool:
        """Whether a verdict has to come before the next step: under a barrier strategy a run goes the same way each
        time.
        """
        number, caught = self._judging
        waits = self._worker.strategy.timing == "barrier" and number not in self._verdicts
        return waits and number > 0 and caught == self._caught

    def _wanted(self, number: int) -> bool:
        return number > self._over

    @property
    def held(self) -> Held:
        """What this member says at a meeting."""
        if not self._pending:
            return Held(self.number, 0, 0, 0, -1)
        first = self._pending[0]
        if first.number != self._ready[0] or self._ready[1] is None:
            self._ready = (first.number, self._buffers.get(f"buffers:{first.number}"))
        ready = self._ready[1] is not None
        steps = -1 if first.save is None else checkpoint_order(first.save)[1]
        return Held(self.number, first.number, ready, first.evaluate, steps)

    def act(self, told: Sequence[Held]) -> Agreed:
        """Does what the members agree on; together, since evaluating takes all of them."""
        what, number = agree(told)
        if what is Agreed.SEE_THROUGH:
            publication = self._pending.pop(0)
            evaluate = any(said.evaluates for said in told)  # two groups may have announced it, each for its own reason
            alike = len({said.saves for said in told}) == 1
            publication = publication._replace(evaluate=evaluate, save=publication.save if alike else None)
            buffers = self._ready[1]
            assert buffers is not None
            self._finish(publication, buffers)
            if evaluate:
                self._judging = number, self._caught
        elif what is Agreed.DROP:
            if self._pending and self._pending[0].number == number:
                self._buffers.drop(f"buffers:{self._pending.pop(0).number}")
            self._worker.say(
                messages.Caught, published=number
            )  # other groups may see it through, and wait for its verdict
        return what

    def pass_over(self, last: int) -> None:
        """Publications up to this one were before the group came together."""
        self._over, self._judging = last, (0, 0)
        self.number = max(self.number, last)
        self._pending = [p for p in self._pending if p.number > last]
        self._queued, self._again = [], {}

    def _clear(self) -> None:
        """The run is over: what only some lanes have heard of by now is dropped."""
        worker, crew = self._worker, self._member.replica.crew
        deadline = worker.time.now() + worker.plan.deadlines.conclude_s
        while True:
            told = [(Held(*held), verdict) for *held, verdict in crew.tell([*self.held, self.awaits])]
            what = self.act([held for held, _ in told])
            if what in (Agreed.NOTHING, Agreed.UNHEARD) and not any(verdict for _, verdict in told):
                break
            self._member.idle(deadline, "the last publications")
        self._pending = []
        self.number = int(max(held.heard for held, _ in told))
