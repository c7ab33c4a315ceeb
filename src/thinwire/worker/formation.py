"""What a generation that begins does at a worker."""

from __future__ import annotations

from typing import final

from torch import Tensor

from thinwire.exchange.ports import StatePort
from thinwire.exchange.signals import Formed
from thinwire.protocol import messages
from thinwire.protocol.observation import ReplicaEntered
from thinwire.worker.comparison import Comparison
from thinwire.worker.generation import Generation
from thinwire.worker.life import Life
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports
from thinwire.worker.round_trigger import RoundTrigger
from thinwire.worker.tuner import Tuner


@final
class Formation:
    """Begins generations."""

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        life: Life,
        *,
        exchange: StatePort,
        trigger: RoundTrigger,
        tuner: Tuner,
        comparison: Comparison,
        publisher: Publisher,
        reports: Reports,
    ) -> None:
        self._local, self._generation, self._life, self._exchange = local, generation, life, exchange
        self._trigger, self._tuner, self._comparison = trigger, tuner, comparison
        self._publisher, self._reports = publisher, reports

    def form(self, formed: Formed) -> None:
        """A generation begins."""
        generation = self._generation
        was_alone = generation.alone and bool(generation.members)
        generation.begin(formed)
        self._life.form()
        self._tuner.first = -1
        if generation.alone:
            self._comparison.leave()
        self._publisher.announced.lead(generation.lead)
        for worker, rows in formed.totals.items():
            generation.hear(worker, rows)
        meets_others = was_alone and not generation.alone
        model = self._become_joint() if formed.restart or meets_others else None
        if meets_others and self._local.strategy.timing == "async":
            # strategies look only at what this worker does from here on
            self._local.state.open(self._local.replica.vector)
            self._trigger.start(self._local.meter.steps)
        if formed.position is not None and self._local.origin is not Origin.STEPS:
            self._succeed(formed, formed.position)
        self._exchange.put(formed.generation, model)
        self._local.joint.observe(ReplicaEntered(generation.number, generation.alone))
        self._reports.report()
        if self._life.finished:  # a coordinator that gave this worker up and took it back has forgotten that
            self._reports.say(messages.Finished)
        self._publisher.resume()

    def _become_joint(self) -> Tensor:
        """The generation goes on with this worker's replica."""
        local = self._local
        model = local.vector_on_host()
        local.weigh_anew()
        if local.strategy.timing != "async" and not self._publisher.concluded:
            local.become_joint(model)
            if local.ahead:
                local.ahead.begin()
        return model

    def _succeed(self, formed: Formed, position: tuple[int, int]) -> None:
        """Goes on where this worker's predecessor left off."""
        local, meter = self._local, self._local.meter
        local.origin = Origin.NEW
        meter.position, meter.rows = position, formed.totals.get(self._reports.worker, 0)
        meter.steps = local.replica.steps = formed.steps
        self._trigger.first_loss = formed.first_loss
