"""The end of a run at one worker: the final model is agreed on, evaluated, saved, and handed back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor

from thinwire.exchange.ports import PublicationsPort
from thinwire.exchange.signals import Averaged
from thinwire.protocol import messages
from thinwire.protocol.identifiers import FINAL, final_checkpoint_name
from thinwire.protocol.observation import Concluded
from thinwire.rules.finite import is_finite
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.nonfinite import refuse
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches, Wait
from thinwire.worker.publication import Publication
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports

RECALIBRATION_BATCHES = 16


@final
class Conclusion:
    """The last publication.

    Args:
        prepare_save: puts the replica into a state that may be saved, and returns this worker's part of a checkpoint.
        model_arrived: whether the driver has the model.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        publisher: Publisher,
        exchange: PublicationsPort,
        means: dict[str, Averaged],
        batches: Batches,
        reports: Reports,
        prepare_save: Callable[[], dict[str, Any]],
        model_arrived: Callable[[], bool],
        wait: Wait,
    ) -> None:
        self._plan, self._local, self._generation, self._publisher = plan, local, generation, publisher
        self._exchange, self._means, self._batches, self._reports = exchange, means, batches, reports
        self._prepare_save, self._model_arrived = prepare_save, model_arrived
        self._wait, self._patience_s = wait, plan.deadlines.conclude_s

    def conclude(self) -> None:
        """Makes the final model and returns once the driver has it."""
        local, publisher = self._local, self._publisher
        for parameter in local.replica.parameters.tensors:
            parameter.grad = None  # there may be no memory for gradients beside the model that is handed back
        model = self._final_model()
        refuse(model, "the final model")
        local.joint.observe(Concluded(model, local.strategy.timing != "async"))
        publisher.concluded = True
        # the count stays as it is: a worker that joins now counts to the same number
        number = publisher.number + 1
        last = Publication(number, model)
        last.give(self._final_buffers(model))
        if self._plan.evaluates:
            publisher.evaluator.evaluate(last)
            self._wait(lambda: number in publisher.evaluator.judged, "the final verdict", self._patience_s)
        if publisher.schedule.saves:
            self._prepare_checkpoint(last)
        self._reports.say(messages.Agreed)  # from here on a lost worker is not replaced
        self._see_off(last)

    def _final_model(self) -> Tensor:
        local, exchange, means = self._local, self._exchange, self._means
        if self._generation.alone:  # no copy: no step follows, and there may be no memory for two
            model: Tensor = local.replica.vector.detach().cpu()
            local.become_joint(model)
            return model
        if local.strategy.timing == "async":
            key = f"joint:{FINAL}"
            exchange.view(key)
            self._wait(lambda: key in means, "the joint model", self._patience_s)
            self._agree()
            return means[key].mean
        joint = local.joint.model
        if joint is None:
            return local.vector_on_host()
        if local.strategy.ends_in_mean:
            key = f"mean:{FINAL}"
            with torch.no_grad():
                own = joint - local.vector_on_host()
            exchange.average(key, own, 1.0 if is_finite(own) else 0.0, {})
            self._wait(lambda: key in means, "the final mean", self._patience_s)
            return joint - means[key].mean  # the joint model stays: a worker that joins now does all this too
        return joint.clone()

    def _agree(self) -> None:
        """Waits until all have the joint model and the publications that any of them has had."""
        publisher, means, key = self._publisher, self._means, f"seen:{FINAL}"
        generation = self._generation
        self._wait(lambda: not (generation.lead and publisher.announced), "the last publications", self._patience_s)
        self._exchange.average(key, torch.zeros(1), 1.0, {"number": publisher.number})
        self._wait(lambda: key in means, "all workers to have the joint model", self._patience_s)
        most = max(int(note.get("number", 0)) for note in means[key].notes.values())
        self._wait(lambda: publisher.number >= most, f"publication {most}", self._patience_s)

    def _final_buffers(self, model: Tensor) -> dict[str, Tensor]:
        local, joint_buffers, key = self._local, self._publisher.buffers, f"buffers:{FINAL}"
        if (local.strategy.ends_in_mean or local.ahead) and not self._generation.alone:
            position = (local.meter.position[0] + 1, 0)
            sample = islice(self._batches.training(position, None), RECALIBRATION_BATCHES)
            local.replica.recalibrate(sample, model)
        joint_buffers.ask(key)
        self._wait(lambda: joint_buffers.get(key) is not None, "the final buffers", self._patience_s)
        buffers = joint_buffers.get(key)
        assert buffers is not None
        return buffers

    def _prepare_checkpoint(self, last: Publication) -> None:
        last.own = self._prepare_save()
        last.own["publisher"]["number"] = last.number  # a run that goes on from here continues the count
        last.joint = self._local.joint.tree()
        if self._local.joint.model is not None:
            last.joint["state"][0] = last.model.clone()
        last.save = final_checkpoint_name(last.number)  # the same on all workers, whose steps may differ by now

    def _see_off(self, last: Publication) -> None:
        """The first worker saves the joint part and hands the model back; its successor does both anew."""
        publisher, generation, owed = self._publisher, self._generation, last.save is not None
        while owed or not self._model_arrived():  # others may have heard of the end before this one is here
            lead = generation.lead
            if last.save is not None and (lead or owed):
                publisher.save(last, last=True)
                owed = False
                publisher.writer.finish(self._patience_s / 2)  # the coordinator has twice the patience
            if lead:
                best, own = publisher.evaluator.best, self._local.replica
                publisher.evaluator.send(own.state_of(last.model, last.buffers) if best is None else best)
            over = lambda was=lead: self._model_arrived() or generation.lead != was  # noqa: E731
            self._wait(over, "the run to end", self._patience_s)
        publisher.writer.close()
