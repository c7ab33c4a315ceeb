"""Publishing the joint model: evaluating it, saving it, handing it back. All workers do it at the same round.

The first worker decides when and says so in its note to a round; whoever lands that round holds the same joint model
and publishes it. Buffers are averaged on the way. Under a barrier strategy workers wait for the verdict, so that a run
goes the same way each time; otherwise they go on stepping.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from thinwire.exchange.signals import Landed, Missed, Published
from thinwire.protocol import messages
from thinwire.protocol.identifiers import FINAL, checkpoint_name, final_checkpoint_name
from thinwire.protocol.observation import Concluded
from thinwire.replicas.torch import SHARED
from thinwire.rules.finite import is_finite
from thinwire.worker.announcements import Announcements
from thinwire.worker.checkpoint_writer import CheckpointWriter, SavePart
from thinwire.worker.joint_buffers import JointBuffers
from thinwire.worker.nonfinite import refuse
from thinwire.worker.resume import newcomers, worker_tree

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker

RESULT_CHUNK_BYTES = 256 << 10
"""Small enough to be heard of on a slow link before its sender passes for lost."""
AUTO_SAVE_S = 15.0
RECALIBRATION_BATCHES = 16


class _Publication(NamedTuple):
    number: int
    model: Tensor
    joint: dict[str, Any] | None
    save: str | None
    own: dict[str, Any] | None
    evaluate: bool


class Publisher:
    """One worker's part in publications."""

    def __init__(self, worker: Worker, save_part: SavePart | None) -> None:
        self._worker = worker
        self.number = 0
        """Publications seen so far."""
        self.went = (0, 0)
        """The name of the last one that came from a table."""
        self.announced = Announcements(f"{worker.plan.worker}.{worker.plan.attempt}")
        self.asked_to_stop: str | None = None
        self._pending: list[_Publication] = []
        self._deferred: list[Landed] = []
        self._epochs_done = 0
        self._evaluated_steps = 0
        self._saved_steps = 0
        self._saved_at = self._worker.time.now()
        self._announced_stop = False
        self._announced: dict[int, dict[str, Any]] = {}
        self._again: dict[str, Any] = {}
        self._models: dict[int, dict[str, Tensor]] = {}
        self._verdicts: set[int] = set()
        self.concluded = False
        """Whether the final model is made: the joint model that it was made of stays as it is."""
        self._caught = 0
        """How often a peer's joint state came in the place of this worker's."""
        self._buffers = JointBuffers(worker)
        self.best: dict[str, Tensor] | None = None
        self._writer = CheckpointWriter(worker, save_part)

    # -- deciding (first worker) ------------------------------------------------------------------------------------

    def note(self, round: int) -> dict[str, Any]:
        """What the first worker says in its note to a round; another says nothing."""
        if not self._worker.lead:
            return {}
        return self._say(round, *self.decide())

    def decide(self) -> tuple[bool, bool, bool]:
        """Whether to evaluate, to save, and to stop."""
        evaluate, save = self._due()
        stop = self.asked_to_stop is not None and not self._announced_stop
        if stop:
            self._announced_stop = True
            evaluate, save = False, self._worker.plan.checkpoint_every is not None
        return evaluate, save, stop

    def _say(self, round: int, evaluate: bool, save: bool, stop: bool) -> dict[str, Any]:
        note, self._again = self._again, {}
        if evaluate or save or stop or note:
            note = (
                {"publish": self.number + 1, "evaluate": evaluate or bool(note.get("evaluate"))}
                | ({"save": self._worker.meter.steps} if save or "save" in note else {})
                | ({"stop": self.asked_to_stop} if stop or "stop" in note else {})
            )
            self._announced[round] = note = self.announced.add(note)
        return note

    def _due(self) -> tuple[bool, bool]:
        worker, plan = self._worker, self._worker.plan
        worker.totals[plan.worker] = worker.rows_done
        epochs = sum(worker.totals.values()) // max(1, worker.total_rows)
        steps = worker.meter.steps
        self._evaluated_steps, self._saved_steps = min(self._evaluated_steps, steps), min(self._saved_steps, steps)
        new_epoch = epochs > self._epochs_done
        if new_epoch:
            self._epochs_done = epochs
        last = plan.epochs is not None and epochs >= plan.epochs
        if plan.evaluate_every is None:
            evaluate = plan.evaluates and new_epoch and not last
        else:
            evaluate = plan.evaluates and steps - self._evaluated_steps >= plan.evaluate_every
        if evaluate:
            self._evaluated_steps = steps
        save = False
        if isinstance(plan.checkpoint_every, int):
            save = steps - self._saved_steps >= plan.checkpoint_every
        elif plan.checkpoint_every == "auto":
            save = new_epoch and not last and self._worker.time.now() - self._saved_at >= AUTO_SAVE_S
        if save:
            self._saved_steps, self._saved_at = steps, self._worker.time.now()
            if self._writer.busy:
                self._writer.skip(checkpoint_name(self.number + 1, steps))
                save = False
        return evaluate, save

    # -- seeing -----------------------------------------------------------------------------------------------------

    def see(self, landed: Landed, *, mid_step: bool) -> None:
        """Takes up what a round's notes ask for; in the middle of a step its update comes first."""
        announced = self._announced.pop(landed.round, None)
        if announced is not None and self._worker.plan.worker not in landed.notes:
            self._again = announced  # a quorum went on without it: say it again with the next round
        if not any("publish" in note for note in landed.notes.values()):
            return
        if mid_step:
            self._deferred.append(landed)
        else:
            self._take_up(landed)

    def publish_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for landed in deferred:
            self._take_up(landed)

    def _take_up(self, landed: Landed) -> None:
        """Numbers it by its own count, the same on all: of two announced, each may be from a worker that led then."""
        notes = [n for n in landed.notes.values() if "publish" in n]
        note = max(notes, key=lambda n: int(n["publish"]))
        self.take_up(note, landed.model if landed.model is not None else self._vector(), landed.joint)

    def hear(self, signal: Published | Missed) -> None:
        """A table has published a model, or did so while this worker was away."""
        self.announced.over(signal.note)
        if isinstance(signal, Published):
            self.went = max(self.went, signal.name)
            self.take_up(signal.note, signal.model, signal.joint)
        elif "stop" in signal.note:
            self._worker.stop()

    def catch_up(self, number: int, went: tuple[int, int]) -> None:
        """The joint state of a peer has come, which had seen so many: what this worker saw beside it is nobody's."""
        self.number, self.went, self._caught = number, max(self.went, went), self._caught + 1
        self._pending, self._deferred = [], []

    def take_up(self, note: dict[str, Any], model: Tensor, joint: dict[str, Any] | None) -> None:
        """Publishes a model that every worker has the same copy of."""
        if "stop" in note:
            self._worker.stop()
        number, steps = self.number + 1, note.get("save")
        save = None if steps is None else checkpoint_name(number, int(steps))
        self._publish(number, model, joint, save, bool(note.get("evaluate")))

    def publish_alone(self) -> None:
        """The only worker publishes when it is due, with no round to wait for."""
        evaluate, save = self._due()
        stop = self.asked_to_stop is not None
        if stop:
            self._worker.stop()
            save = self._worker.plan.checkpoint_every is not None
        if evaluate or save:
            number = self.number + 1
            model = self._vector()
            self._worker.joint.set_model(model)
            name = checkpoint_name(number, self._worker.meter.steps) if save else None
            self._publish(number, model, self._worker.joint.tree() if save else None, name, evaluate)

    def _vector(self) -> Tensor:
        found: Tensor = self._worker.replica.vector.detach().to("cpu", copy=True)
        return found

    def _publish(
        self, number: int, model: Tensor, joint: dict[str, Any] | None, save: str | None, evaluate: bool
    ) -> None:
        worker = self._worker
        refuse(model, "the joint model")
        self.number = max(self.number, number)
        if save is not None:
            worker.guard.leave()  # what it learnt alone is no part of a checkpoint
            worker.nonfinite.settle()
        own = worker_tree(worker) if save is not None else None
        if self._wanted(number):
            self._pending.append(_Publication(number, model, joint, save, own, evaluate))
        self._buffers.ask(f"buffers:{number}")
        self.resume()
        self._await_verdict(number, evaluate)

    def _wanted(self, number: int) -> bool:
        return True

    def _await_verdict(self, number: int, evaluate: bool) -> None:
        """Under a barrier strategy a run goes the same way each time."""
        worker = self._worker
        if worker.strategy.timing == "barrier" and evaluate:
            waiting = f"the verdict on evaluation {number}"
            caught = self._caught
            over = lambda: number in self._verdicts or self._caught > caught  # noqa: E731
            worker.wait(over, waiting, worker.plan.deadlines.conclude_s)

    def resume(self) -> None:
        """Finishes publications whose buffers have come."""
        while self._pending:
            buffers = self._buffers.get(f"buffers:{self._pending[0].number}")
            if buffers is None:
                return
            self._finish(self._pending.pop(0), buffers)

    def _finish(self, publication: _Publication, buffers: dict[str, Tensor]) -> None:
        worker = self._worker
        self._buffers.drop(f"buffers:{publication.number}")
        if publication.evaluate:
            self._evaluate(publication.number, publication.model, buffers)
            if worker.plan.keeps_best:
                self._models[publication.number] = worker.replica.state_of(publication.model, buffers)
            self._show(publication.number, publication.model, buffers)
        if publication.save is not None:
            self._save(publication, buffers)

    def _evaluate(self, number: int, model: Tensor, buffers: dict[str, Tensor]) -> None:
        worker = self._worker
        meter, began = worker.meter, worker.time.now()
        sums, weights, rows = worker.replica.evaluate(worker.batches.validation(), model, buffers)
        meter.evaluated(worker.time.now() - began)
        worker.say(
            messages.Evaluated,
            number=number,
            sums=sums,
            weights=weights,
            rows=rows,
            steps=meter.steps,
            done=meter.rows,
        )

    def judged(self, verdict: messages.Verdict) -> None:
        """Keeps the model that was found best, drops the others; it may be said again to one that had not heard it."""
        if verdict.number in self._verdicts:
            return
        self._verdicts.add(verdict.number)
        self._worker.replica.end_evaluation(dict(verdict.metrics))
        state = self._models.pop(verdict.number, None)
        if verdict.best and state is not None:
            self.best = state

    # -- saving -----------------------------------------------------------------------------------------------------

    def _save(self, publication: _Publication, buffers: dict[str, Tensor], *, last: bool = False) -> None:
        worker, name = self._worker, publication.save
        if name is None:
            return
        trees: dict[str, object] = {f"worker-{worker.plan.worker}": publication.own}
        if worker.lead and publication.joint is not None:
            assert publication.own is not None
            joint: dict[str, Any] = {
                "joint": publication.joint,
                "model": worker.replica.state_of(publication.model, buffers),
                "publisher": self.tree() | {"number": max(self.number, publication.number)},
                **newcomers(publication.own),
            }
            if worker.strategy.replicated:
                own: Any = publication.own["replica"]  # of the same step, whatever has been computed since
                joint["replica"] = {name: own[name] for name in SHARED}
            trees[self.joint_name] = joint
        self._writer.write(name, trees, last=last)

    part = 0
    joint_name = "joint"
    """The part of a checkpoint that the first worker writes."""

    def tree(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "epochs_done": self._epochs_done,
            "evaluated_steps": self._evaluated_steps,
            "saved_steps": self._saved_steps,
            "best": self.best,
        }

    def load(self, tree: dict[str, Any]) -> None:
        self.number, self._epochs_done = int(tree["number"]), int(tree["epochs_done"])
        self._evaluated_steps, self._saved_steps = int(tree["evaluated_steps"]), int(tree["saved_steps"])
        self.best = tree.get("best")

    # -- the end ----------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """The last publication: the final model is agreed on, evaluated, saved, and the first worker hands it back."""
        worker, plan = self._worker, self._worker.plan
        self._clear()
        for parameter in worker.replica.parameters.tensors:
            parameter.grad = None  # there may be no memory for it beside what is handed back
        model = self._final_model()
        refuse(model, "the final model")
        worker.joint.observe(Concluded(model, worker.strategy.timing != "async"))
        self.concluded = True
        if (worker.strategy.ends_in_mean or worker.ahead) and not worker.alone:
            position = (worker.meter.position[0] + 1, 0)
            sample = islice(worker.batches.training(position, None), RECALIBRATION_BATCHES)
            worker.replica.recalibrate(sample, model)
        key = f"buffers:{FINAL}"
        self._buffers.ask(key)
        worker.wait(lambda: self._buffers.get(key) is not None, "the final buffers", plan.deadlines.conclude_s)
        buffers = self._buffers.get(key)
        assert buffers is not None
        number = self.number + 1  # and so it stays: who joins while this goes on is to count to the same
        if plan.evaluates:
            self._evaluate(number, model, buffers)
            if plan.keeps_best:
                self._models[number] = worker.replica.state_of(model, buffers)
            self._show(number, model, buffers)
            worker.wait(lambda: number in self._verdicts, "the final verdict", plan.deadlines.conclude_s)
        last = None
        if plan.checkpoint_every is not None:
            worker.nonfinite.settle()
            own = worker_tree(worker)
            own["publisher"]["number"] = number  # who goes on from here counts on
            name = final_checkpoint_name(number)  # the same on all, whose steps may differ by now
            tree = worker.joint.tree()
            if worker.joint.model is not None:
                tree["state"][0] = model.clone()
            last = _Publication(number, model, tree, name, own, False)
        worker.say(messages.Agreed)  # from here on whoever is lost is not replaced
        self._see_off(last, model, buffers)

    def _clear(self) -> None:
        """Sees what was announced through."""
        self._worker.wait(lambda: not self._pending, "the last publications", self._worker.plan.deadlines.conclude_s)

    def _final_model(self) -> Tensor:
        worker = self._worker
        if worker.alone:  # no step follows, so that it need not be copied: there may be no memory for two
            model: Tensor = worker.replica.vector.detach().cpu()
            worker.give_to_joint(model)
            return model
        if worker.strategy.timing == "async":
            key = f"joint:{FINAL}"
            worker.exchange.view(key)
            worker.wait(lambda: key in worker.averaged, "the joint model", worker.plan.deadlines.conclude_s)
            self._agree()
            return worker.averaged[key].mean
        joint = worker.joint.model
        if joint is None:
            return self._vector()
        if worker.strategy.ends_in_mean:
            key = f"mean:{FINAL}"
            with torch.no_grad():
                own = joint - self._vector()
            worker.exchange.average(key, own, 1.0 if is_finite(own) else 0.0, {})
            worker.wait(lambda: key in worker.averaged, "the final mean", worker.plan.deadlines.conclude_s)
            return joint - worker.averaged[key].mean  # the joint model stays: who joins now does all this too
        return joint.clone()

    def _agree(self) -> None:
        """Waits until all have the joint model and the publications that any of them has had."""
        worker, key = self._worker, f"seen:{FINAL}"
        patience_s = worker.plan.deadlines.conclude_s
        worker.wait(lambda: not (worker.lead and self.announced), "the last publications", patience_s)
        worker.exchange.average(key, torch.zeros(1), 1.0, {"number": self.number})
        worker.wait(lambda: key in worker.averaged, "all workers to have the joint model", patience_s)
        most = max(int(note.get("number", 0)) for note in worker.averaged[key].notes.values())
        worker.wait(lambda: self.number >= most, f"publication {most}", patience_s)

    def _see_off(self, last: _Publication | None, model: Tensor, buffers: dict[str, Tensor]) -> None:
        """The first worker saves what is of all, and hands the model back; who becomes the first does both anew."""
        worker, plan, owed = self._worker, self._worker.plan, last is not None
        while owed or not worker.model_arrived:  # others may have heard of the end before this one is here
            lead = worker.lead
            if last is not None and (lead or owed):
                self._save(last, buffers, last=True)
                owed = False
                self._writer.finish(plan.deadlines.conclude_s / 2)  # the coordinator has twice the patience
            if lead:
                state = self.best if self.best is not None else worker.replica.state_of(model, buffers)
                self._hand_back(state)
            worker.wait(
                lambda was=lead: worker.model_arrived or worker.lead != was,  # type: ignore[misc]
                "the run to end",
                plan.deadlines.conclude_s,
            )
        self._writer.close()

    def _show(self, number: int, model: Tensor, buffers: dict[str, Tensor]) -> None:
        """The first worker sends the driver the joint model of an evaluation, where a callback is to be given it."""
        if self._worker.plan.shows and self._worker.lead:
            self._hand_back(self._worker.replica.state_of(model, buffers), shown=number)

    def _hand_back(self, state: dict[str, Any], shown: int | None = None) -> None:
        """Sends a model in chunks, one by one: all of it at once takes its memory several times."""
        worker = self._worker
        chunks = worker.replica.pieces_of(state)
        for chunk, held in enumerate(chunks):
            data = memoryview(worker.exchange.encode(held))
            count = max(1, -(-len(data) // RESULT_CHUNK_BYTES))
            for index in range(count):
                piece = data[index * RESULT_CHUNK_BYTES : (index + 1) * RESULT_CHUNK_BYTES]
                where: dict[str, Any] = {"index": index, "count": count, "chunk": chunk, "chunks": len(chunks)}
                where |= {"attempt": worker.plan.attempt, "part": self.part}
                told = messages.Result(**where) if shown is None else messages.Shown(number=shown, **where)
                worker.exchange.report(told, piece)
