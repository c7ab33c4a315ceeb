"""A worker with a replica of its own: it steps by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from thinwire.exchange.notes import Note
from thinwire.exchange.ports import ReportsPort
from thinwire.exchange.signals import Formed, GroupBrokenError, Landed
from thinwire.worker.generation import Generation
from thinwire.worker.inbox import Inbox
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batch, Batches, Loop, Rendezvous, Synchronizer
from thinwire.worker.publisher import Publisher
from thinwire.worker.stepper import Stepper


@final
class WholeLoop(Loop):
    """See `thinwire.worker.ports.Loop`."""

    may_hand_over = True

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        batches: Batches,
        exchange: ReportsPort,
        synchronizer: Synchronizer,
        publisher: Publisher,
        inbox: Inbox,
        stepper: Stepper,
        concludes: Callable[[], bool],
        goes_on: Callable[[], bool],
    ) -> None:
        self._plan, self._local, self._generation, self._batches = plan, local, generation, batches
        self._exchange, self._synchronizer, self._publisher = exchange, synchronizer, publisher
        self._inbox, self._stepper, self._concludes, self._goes_on = inbox, stepper, concludes, goes_on

    def train(self) -> None:
        plan = self._plan
        if self._goes_on():
            self.consider_round()
        epochs = plan.epochs if plan.beyond is None else None
        for batch in self._batches.training(self._local.meter.position, epochs):
            if not self._exchange.quiet:
                self._inbox.take_signals(0.0)
            if not self._goes_on():
                break
            self._stepper.step(batch)

    def consider_round(self) -> None:
        self._publisher.publish_deferred()
        if self._generation.alone:
            self._publisher.publish_alone()
        else:
            self._synchronizer.launch_if_due()

    def announcement(self, round: int) -> Note:
        return self._publisher.note(round)

    def weigh(self, batch: Batch) -> float:
        return float(self._local.replica.weight_of(batch))

    def await_others(self, patience_s: float) -> None:
        self._inbox.wait(self._concludes, "the other workers to finish", patience_s)

    def clear_publications(self) -> None:
        patience_s = self._plan.deadlines.conclude_s
        self._inbox.wait(lambda: not self._publisher.pending, "the last publications", patience_s)

    def holds(self, landed: Landed) -> bool:
        return False


@final
class WholeRendezvous(Rendezvous):
    """See `thinwire.worker.ports.Rendezvous`: this worker is a group of one."""

    again, sent_bytes = False, 0

    def __init__(
        self, local: LocalModel, generation: Generation, inbox: Inbox, *, join_s: float, form: Callable[[Formed], None]
    ) -> None:
        self._local, self._generation, self._inbox = local, generation, inbox
        self._join_s, self._form = join_s, form

    def begin(self) -> bool:
        generation = self._generation
        there = lambda: bool(generation.members) and not generation.needs_state  # noqa: E731
        self._inbox.wait(there, "a generation to form", self._join_s)
        return self._local.origin is Origin.CHECKPOINT

    @property
    def replaces_joint(self) -> bool:
        return self._generation.alone

    def take(self, formed: Formed) -> None:
        self._form(formed)

    def part_ways(self, why: GroupBrokenError) -> None:
        raise why
