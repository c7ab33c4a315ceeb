"""Publishing the joint model: evaluating it, saving it, or both. All workers do it at the same round.

The first worker decides when and says so in its note to a round. Every worker that lands this round holds the same
joint model and publishes it. Buffers are averaged on the way. Under a barrier strategy workers wait for the verdict, so
that a run goes the same way each time; otherwise they go on stepping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from thinwire.exchange.signals import Landed, Missed, Published
from thinwire.protocol.identifiers import checkpoint_name
from thinwire.worker.announcements import Announcements
from thinwire.worker.checkpoint_writer import CheckpointWriter
from thinwire.worker.evaluator import Evaluator
from thinwire.worker.generation import Generation
from thinwire.worker.joint_buffers import JointBuffers
from thinwire.worker.local_model import LocalModel
from thinwire.worker.nonfinite import refuse
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Wait
from thinwire.worker.publication import Publication, PublicationEvent
from thinwire.worker.publication_schedule import Decision, PublicationSchedule


@final
class Publisher:
    """One worker's part in publications.

    Members of a group see publications through together when they meet (`thinwire.worker.group_publications`), under
    the number of the announcement. Other workers count publications by themselves, and finish each when its buffers
    have come.

    Args:
        prepare_save: puts the replica into a state that may be saved, and returns this worker's part of a checkpoint.
        stop: makes the step under way the last one.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        schedule: PublicationSchedule,
        evaluator: Evaluator,
        buffers: JointBuffers,
        writer: CheckpointWriter,
        prepare_save: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        wait: Wait,
    ) -> None:
        self._plan, self._local, self._generation = plan, local, generation
        self.schedule, self.evaluator, self.buffers, self.writer = schedule, evaluator, buffers, writer
        self._prepare_save, self.stop, self._wait = prepare_save, stop, wait
        self._in_group, self._part = plan.group_size > 1, plan.worker % plan.group_size
        self.number = 0
        """Publications seen so far."""
        self.went = (0, 0)
        """The name of the last publication that came from a table."""
        self.announced = Announcements(f"{plan.worker}.{plan.attempt}")
        self.pending: list[Publication] = []
        """Publications whose buffers have yet to come."""
        self._deferred: list[Landed] = []
        self.concluded = False
        """Whether the final model is made: the joint model that it was made of stays as it is."""
        self.passed = 0
        """Publications up to this one were before this worker's group came together."""
        self.num_caught_up = 0
        """How often a peer's joint state has replaced this worker's."""

    # -- deciding (first worker) ------------------------------------------------------------------------------------

    def decide(self) -> Decision:
        """What the first worker wants to publish."""
        return self.schedule.decide(self.number + 1)

    def note(self, round: int) -> dict[str, Any]:
        """What the first worker says in its note to a round; other workers say nothing."""
        if not self._generation.lead:
            return {}
        due, note = self.decide(), self.announced.take_lost()
        if any(due) or note:
            note = (
                {"publish": self.number + 1, "evaluate": due.evaluate or bool(note.get("evaluate"))}
                | ({"save": self._local.meter.steps} if due.save or "save" in note else {})
                | ({"stop": self.schedule.stop_reason} if due.stop or "stop" in note else {})
            )
        return self.announced.say(round, note)

    # -- seeing -----------------------------------------------------------------------------------------------------

    def see(self, landed: Landed, *, mid_step: bool) -> None:
        """Takes up what a round's notes ask for; in the middle of a step its update comes first."""
        self.announced.landed(landed.round, heard=self._plan.worker in landed.notes)
        if any("publish" in note for note in landed.notes.values()):
            if mid_step:
                self._deferred.append(landed)
            else:
                self._take_up_round(landed)

    def publish_deferred(self) -> None:
        """Takes up rounds that landed in the middle of a step."""
        deferred, self._deferred = self._deferred, []
        for landed in deferred:
            self._take_up_round(landed)

    def _take_up_round(self, landed: Landed) -> None:
        notes = [n for n in landed.notes.values() if "publish" in n]
        note = max(notes, key=lambda n: int(n["publish"]))
        self.take_up(note, landed.model if landed.model is not None else self._local.vector_on_host(), landed.joint)

    def hear(self, signal: Published | Missed) -> None:
        """A table has published a model, or did so while this worker was away."""
        self.announced.over(signal.note)
        if isinstance(signal, Published):
            self.went = max(self.went, signal.name)
            self.take_up(signal.note, signal.model, signal.joint)
        elif "stop" in signal.note:
            self.stop()
        if self._in_group and not self.announced:
            self.announced.clear()

    def catch_up(self, number: int, went: tuple[int, int], best: dict[str, Tensor] | None) -> None:
        """A peer's joint state has come: its publications count, and those that only this worker saw are dropped."""
        self.number, self.went, self.num_caught_up = number, max(self.went, went), self.num_caught_up + 1
        self.drop()
        self._deferred, self.evaluator.best = [], best

    def take_up(self, note: dict[str, Any], model: Tensor, joint: dict[str, Any] | None) -> None:
        """Publishes a model that every worker has the same copy of.

        Workers count locally: the counts agree even if an old and a new first worker both announced. Lanes of groups
        may hear of different announcements, so that members go by the announced number and publish it once.
        """
        if "stop" in note:
            self.stop()
        number = int(note["publish"]) if self._in_group else self.number + 1
        if number <= self.number:  # heard of twice, or after a later one: others may want its buffers all the same
            self.buffers.ask(f"buffers:{number}")
            return
        steps = note.get("save")
        save = None if steps is None else checkpoint_name(number, int(steps))
        self.publish(number, model, joint, save=save, evaluate=bool(note.get("evaluate")))

    def publish_alone(self) -> None:
        """The only worker publishes when it is due, with no round to wait for."""
        due = self.schedule.due(self.number + 1)
        if self.schedule.stop_reason is not None:
            self.stop()
            due = due._replace(save=self.schedule.saves)
        if due.evaluate or due.save:
            self.publish_replica(self.number + 1, self._local.meter.steps, due)

    def publish_replica(self, number: int, steps: int, due: Decision) -> None:
        """The replica is the joint model, since there is no other: publishes it."""
        joint, model = self._local.joint, self._local.vector_on_host()
        joint.set_model(model)
        if due.evaluate or due.save:
            name = checkpoint_name(number, steps) if due.save else None
            self.publish(number, model, joint.tree() if due.save else None, save=name, evaluate=due.evaluate)

    def publish(
        self, number: int, model: Tensor, joint: dict[str, Any] | None, *, save: str | None, evaluate: bool
    ) -> None:
        """Begins a publication: asks for its buffers."""
        refuse(model, "the joint model")
        self.number = max(self.number, number)
        own = None if save is None else self._prepare_save()
        if number > self.passed:
            self.pending.append(Publication(number, model, joint, save=save, own=own, evaluate=evaluate))
        self.buffers.ask(f"buffers:{number}")
        self.resume()
        if evaluate and self._local.strategy.timing == "barrier" and not self._in_group:
            caught = self.num_caught_up
            over = lambda: number in self.evaluator.judged or self.num_caught_up > caught  # noqa: E731
            self._wait(over, f"the verdict on evaluation {number}", self._plan.deadlines.conclude_s)

    def resume(self) -> None:
        """Finishes publications whose buffers have come; members of a group do so when they meet."""
        while not self._in_group and self.is_ready:
            self.finish(self.pending.pop(0))

    @property
    def is_ready(self) -> bool:
        """Whether the buffers of the first pending publication are here."""
        if not self.pending:
            return False
        first = self.pending[0]
        if not first.is_buffered and (buffers := self.buffers.get(f"buffers:{first.number}")) is not None:
            first.give(buffers)
        return first.is_buffered

    def finish(self, publication: Publication) -> None:
        """Evaluates and saves a publication whose buffers are here."""
        self.buffers.drop(f"buffers:{publication.number}")
        if publication.evaluate:
            self.evaluator.evaluate(publication)
        self.save(publication)

    def drop(self, up_to: float = math.inf) -> None:
        """Drops pending publications up to a number; all unless it is given."""
        for publication in [p for p in self.pending if p.number <= up_to]:
            publication.move(PublicationEvent.DROP)
            self.pending.remove(publication)

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, publication: Publication, *, last: bool = False) -> None:
        """Writes this worker's part of a checkpoint; the first worker writes the joint part too."""
        local, name, own = self._local, publication.save, publication.own
        publication.move(PublicationEvent.SKIP if name is None else PublicationEvent.SAVE)
        if name is None:
            return
        trees: dict[str, object] = {f"worker-{self._plan.worker}": own}
        if self._generation.lead and publication.joint is not None:
            assert own is not None
            joint: dict[str, Any] = {
                "joint": publication.joint,
                "model": local.replica.state_of(publication.model, publication.buffers),
                "publisher": self.tree() | {"number": max(self.number, publication.number)},
                # what a worker needs that has no part of its own: buffers, and where its learning rate is
                "buffers": own["replica"]["buffers"],
                "counts": own["replica"]["counts"],
                "schedule": own["schedule"],
            }
            if local.strategy.replicated:
                joint["replica"] = local.replica.shared()
            trees["joint" if not self._part else f"joint-{self._part}"] = joint
        self.writer.write(name, trees, last=last)

    def tree(self) -> dict[str, Any]:
        return {"number": self.number, **self.schedule.tree(), "best": self.evaluator.best}

    def load(self, tree: dict[str, Any]) -> None:
        self.number, self.evaluator.best = int(tree["number"]), tree.get("best")
        self.schedule.load(*(int(tree[name]) for name in self.schedule.tree()))
