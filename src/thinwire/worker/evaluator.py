"""Evaluating published models at one worker, keeping the best, and sending models to the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from thinwire.protocol import messages
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches
from thinwire.worker.publication import Publication, PublicationEvent
from thinwire.worker.reports import Reports

RESULT_CHUNK_BYTES = 256 << 10
"""Small enough for a slow link: the coordinator hears of each chunk before it takes its sender for lost."""


@final
class Evaluator:
    """This worker's part in evaluations."""

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        batches: Batches,
        reports: Reports,
        encode: Callable[[object], bytes],
    ) -> None:
        self._plan, self._replica, self._meter, self._generation = plan, local.replica, local.meter, generation
        self._batches, self._reports, self._encode = batches, reports, encode
        self._models: dict[int, dict[str, Tensor]] = {}
        """Models whose verdicts are awaited, by publication, where the best one is kept."""
        self.judged: set[int] = set()
        """Publications whose verdicts this worker has heard."""
        self.best: dict[str, Tensor] | None = None

    def evaluate(self, publication: Publication) -> None:
        """Reports what the own validation rows say of a model, and shows the model to the driver's callbacks."""
        publication.move(PublicationEvent.EVALUATE)
        number, model, buffers = publication.number, publication.model, publication.buffers
        replica, meter, began = self._replica, self._meter, self._meter.now()
        sums, weights, rows = replica.evaluate(self._batches.validation(), model, buffers)
        meter.evaluated(meter.now() - began)
        told: dict[str, Any] = {"sums": sums, "weights": weights, "rows": rows, "steps": meter.steps}
        self._reports.say(messages.Evaluated, number=number, done=meter.rows, **told)
        if self._plan.keeps_best:
            self._models[number] = replica.state_of(model, buffers)
        if self._plan.shows and self._generation.lead:
            self.send(replica.state_of(model, buffers), shown=number)

    def judge(self, verdict: messages.Verdict) -> None:
        """Keeps the model that was found best and drops the others; a verdict that is heard again changes nothing."""
        if verdict.number in self.judged:
            return
        self.judged.add(verdict.number)
        self._replica.end_evaluation(dict(verdict.metrics))
        state = self._models.pop(verdict.number, None)
        if verdict.best and state is not None:
            self.best = state

    def send(self, state: dict[str, Tensor], shown: int | None = None) -> None:
        """Sends the driver a model in chunks, one by one: all of it at once takes its memory several times."""
        part = self._plan.worker % self._plan.group_size
        chunks = self._replica.pieces_of(state)
        for chunk, held in enumerate(chunks):
            data = memoryview(self._encode(held))
            count = max(1, -(-len(data) // RESULT_CHUNK_BYTES))
            for index in range(count):
                piece = data[index * RESULT_CHUNK_BYTES : (index + 1) * RESULT_CHUNK_BYTES]
                where: dict[str, Any] = {"index": index, "count": count, "chunk": chunk, "chunks": len(chunks)}
                if shown is None:
                    self._reports.say(messages.Result, piece, part=part, **where)
                else:
                    self._reports.say(messages.Shown, piece, part=part, number=shown, **where)
