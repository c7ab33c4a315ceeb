"""One step of a worker: the gradient, what workers exchange about it, the update, and the accounts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch

from thinwire.protocol import messages
from thinwire.strategies import Strategy
from thinwire.worker.comparison import Comparison
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.nonfinite import NonFinite
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Batch, Synchronizer
from thinwire.worker.reports import Reports
from thinwire.worker.round_trigger import RoundTrigger


@final
class Stepper:
    """Takes steps.

    Args:
        consider_round: what is done between two steps.
        after: what is done last.
        batches_per_epoch: of this worker's rows.
    """

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        *,
        synchronizer: Synchronizer,
        rounds: OpenRounds,
        trigger: RoundTrigger,
        nonfinite: NonFinite,
        comparison: Comparison,
        reports: Reports,
        consider_round: Callable[[], None],
        after: Callable[[], None],
        batches_per_epoch: int,
    ) -> None:
        self._local, self._generation, self._synchronizer, self._rounds = local, generation, synchronizer, rounds
        self._trigger, self._nonfinite, self._comparison, self._reports = trigger, nonfinite, comparison, reports
        self._consider_round, self._after = consider_round, after
        self._batches_per_epoch = batches_per_epoch
        self._replica, self._meter, self._barrier = local.replica, local.meter, local.strategy.timing == "barrier"
        self._shifts = type(local.strategy).before_step is not Strategy.before_step
        """Whether the replica moves before its gradient is computed: what it contributes is what the last step left."""

    def step(self, batch: Batch, *, idle: bool = False) -> None:
        """Takes a step; `idle` where the rows are another step's, since those of this worker are done."""
        self._synchronizer.prepare()
        begun = self._meter.begin_step()
        self._local.origin = Origin.STEPS
        together = not self._generation.alone
        loss = self._gradient(batch, together=together)
        takes = self._nonfinite.takes(loss)
        self._synchronizer.take(batch, takes=takes, together=together)
        self._rounds.adopted = max(self._rounds.adopted, self._rounds.landed)
        if math.isfinite(loss):
            self._trigger.step(loss)
        # a worker that waits for each reply knows how long a step takes on the device
        if not self._barrier and self._local.waits(self._rounds.next):
            self._replica.finish()
        self._book(batch, begun, loss, idle=idle)
        if together:
            self._synchronizer.pause()
        self._comparison.step()
        if self._generation.alone or self._local.waits(self._rounds.next):
            self._consider_round()
        self._after()

    def _gradient(self, batch: Batch, *, together: bool) -> float:
        """Computes the gradient, with the strategy's own term; returns the loss."""
        local, replica = self._local, self._replica
        cycle, setting = local.joint.cycle(), local.joint.setting()  # the exchange may land a round meanwhile
        if together:
            if not self._barrier:
                self._consider_round()
            if self._shifts:
                self._rounds.settle()
            with torch.no_grad():
                local.state.before_step(replica.vector, cycle, setting)
            self._synchronizer.begin(batch)
        loss = replica.gradient(batch)
        if math.isfinite(loss) and self._meter.samples_gradient(batch.position):
            self._meter.sampled_gradient(replica.gradient_norm())
        if together:
            with torch.no_grad():
                term = local.state.gradient_term(replica.vector, cycle, setting)
                if term is not None:
                    replica.parameters.add_to_gradients(term)
                self._rounds.settle()
        return loss

    def _book(self, batch: Batch, begun: float, loss: float, *, idle: bool) -> None:
        meter = self._meter
        if idle:
            meter.end_step(begun, 0, loss, meter.position)
        else:
            epoch, number = batch.position
            ended = number + 1 >= self._batches_per_epoch
            meter.end_step(begun, batch.num_rows, loss, (epoch + 1, 0) if ended else (epoch, number + 1))
            if ended:
                norm = meter.epoch_gradient_norm
                rows, mean_loss = meter.end_epoch()
                self._replica.end_epoch()
                self._reports.say(messages.Epoch, epoch=epoch, rows=rows, loss=mean_loss, gradient_norm=norm)
        self._reports.report_if_due()
