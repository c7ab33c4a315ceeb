"""Publications of replicas that span several workers: members announce them along their lanes, and see them through
together when all of them hold the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.engine.outcome import name_of
from thinwire.engine.publishing import Publisher
from thinwire.engine.signals import Missed, Published

if TYPE_CHECKING:
    from thinwire.engine.grouped import GroupWorker


class GroupPublisher(Publisher):
    """Publications that the members of a group see through together; each announces them along its lane."""

    def __init__(self, worker: GroupWorker, *args: Any) -> None:
        super().__init__(worker, *args)
        self._member = worker
        self.part = worker.plan.worker % worker.plan.group_size
        self.joint_name = "joint" if not self.part else f"joint-{self.part}"
        self._queued: list[dict[str, Any]] = []
        self._over = 0

    def note(self, round: int) -> dict[str, Any]:
        note, self._again = self._again, {}
        if not note and self._queued:
            note = self._queued.pop(0)
        if note:
            self._announced[round] = note = self.announced.add(note)
        return note

    @property
    def said(self) -> int:
        """Publications heard of, announced or about to be."""
        return self.number + len(self._announced) + len(self._queued) + bool(self._again)

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
            name = name_of(number, steps) if save else None
            self._publish(number, model, self._member.joint.tree() if save else None, name, evaluate)

    def _shown(self, number: int, note: dict[str, Any]) -> int:
        return int(note["publish"])  # lanes may count differently, where the group that announced it was lost

    def resume(self) -> None:
        return  # at the group's next meeting

    def _await_verdict(self, number: int, evaluate: bool) -> None:
        return  # at the group's next meeting

    def _wanted(self, number: int) -> bool:
        return number > self._over

    @property
    def ready(self) -> int:
        """The last publication that this member could see through."""
        last = self._pending[0].number - 1 if self._pending else self.number
        for publication in self._pending:
            if self._buffers.get(f"buffers:{publication.number}") is None:
                break
            last = publication.number
        return last

    def finish(self, last: int) -> None:
        """Sees publications through, together with the group."""
        while self._pending and self._pending[0].number <= last:
            publication = self._pending.pop(0)
            buffers = self._buffers.get(f"buffers:{publication.number}")
            assert buffers is not None
            self._finish(publication, buffers)
            super()._await_verdict(publication.number, publication.evaluate)

    def pass_over(self, last: int) -> None:
        """Publications up to this one were before the group came together."""
        self._over = last
        self.number = max(self.number, last)
        self._pending = [p for p in self._pending if p.number > last]
        self._queued, self._again = [], {}

    def _clear(self) -> None:
        patience_s = self._worker.plan.deadlines.conclude_s
        self._worker.wait(lambda: self.ready >= self.number or not self._pending, "the last publications", patience_s)
        told = self._member.replica.crew.tell([self.number])
        self.finish(int(min(each[0] for each in told)))
        self._pending = []
        self.number = int(max(each[0] for each in told))  # one that only some lanes heard of is nobody's
