"""A worker that holds a part of a replica: it steps together with the other members of its group, or not at all.

Before each step the members meet: each says how far it is, and the first member decides for all whether a round is due,
what is to be published, and when to stop. Everything else a member does as a worker alone does, along its lane.
What breaks a group, a lost member above all, ends the step under way; when the group is whole again, its members start
from the joint model, as newcomers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

from thinwire.errors import TimedOutError
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Exchange
from thinwire.exchange.signals import Landed
from thinwire.worker.generation import Generation
from thinwire.worker.group_publications import GroupPublications
from thinwire.worker.group_rendezvous import GroupRendezvous
from thinwire.worker.inbox import Inbox
from thinwire.worker.life import Life
from thinwire.worker.local_model import LocalModel
from thinwire.worker.local_steps import LocalSteps
from thinwire.worker.meeting import Agreed, Awaits, Held, Said
from thinwire.worker.nonfinite import NonFinite
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batch, Batches, PartOfReplica
from thinwire.worker.publication_schedule import Decision
from thinwire.worker.publisher import Publisher
from thinwire.worker.reports import Reports
from thinwire.worker.state_transfer import StateTransfer
from thinwire.worker.stepper import Stepper

WEIGHT = 1
"""Where the weight of a member's rows is in what it says at a meeting; their number is before it."""
IDLE_S = 0.02
GIVE_ANYWAY_S = 2.0
"""How long a member holds back a joint state until peers have asked the other members for theirs."""


@final
class GroupLoop:
    """See `thinwire.worker.ports.Loop`.

    Args:
        steps: what launches rounds; None where each step is a round.
        goes_on: whether this member has further steps to take.
        concludes: whether all workers are done.
        land: takes over what a round gave.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        local: LocalModel,
        generation: Generation,
        *,
        replica: PartOfReplica,
        batches: Batches,
        exchange: Exchange,
        rounds: OpenRounds,
        steps: LocalSteps | None,
        inbox: Inbox,
        stepper: Stepper,
        reports: Reports,
        nonfinite: NonFinite,
        publisher: Publisher,
        publications: GroupPublications,
        rendezvous: GroupRendezvous,
        transfer: StateTransfer,
        life: Life,
        goes_on: Callable[[], bool],
        concludes: Callable[[], bool],
        land: Callable[[Landed], None],
    ) -> None:
        self._plan, self._local, self._generation, self._replica = plan, local, generation, replica
        self._batches, self._exchange, self._rounds, self._steps = batches, exchange, rounds, steps
        self._inbox, self._stepper, self._reports, self._nonfinite = inbox, stepper, reports, nonfinite
        self._publisher, self._publications, self._rendezvous = publisher, publications, rendezvous
        self._transfer, self._life = transfer, life
        self._goes_on, self._concludes, self._land = goes_on, concludes, land
        self._strategy, self._meter, self._crew = local.strategy, local.meter, replica.crew
        self._barrier = local.strategy.timing == "barrier"
        self._first = plan.worker % plan.group_size == 0
        self._owes = False
        """Whether the group has yet to launch the round that was due."""
        self._weight_in_step = 0.0
        self._asked_at = 0.0
        self._held: list[Landed] = []
        """Means of others' gradients, which members take their steps on together."""

    def train(self) -> None:
        feed = iter(self._batches.training(self._meter.position, self._plan.epochs))
        self._rendezvous.meets = True
        while True:
            if not self._exchange.quiet:
                self._inbox.take_signals(0.0)
            batch = next(feed, None) if self._goes_on() else None
            met = self._replica.meet(batch, *self._statement(batch))
            told = [Said(*each[2:]) for each in met]
            self._weight_in_step = sum(each[WEIGHT] for each in met)
            rows = sum(int(n) for n, said in zip(self._crew.rows, told, strict=True) if said.has_rows)
            if any(said.flawed for said in told):
                self._nonfinite.start_anew("its parameters were not finite any more")
            if not rows or any(said.stops for said in told):
                break
            self._act(told)
            self._stepper.step(self._replica.spare if batch is None else batch, idle=batch is None)
        if self._barrier:
            self._see_through()

    def weigh(self, batch: Batch) -> float:
        return self._weight_in_step

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _statement(self, batch: Batch | None = None, *, decides: bool = True) -> Said:
        launch, due, steps = False, Decision(), self._steps
        if self._first and decides:
            if self._generation.alone or steps is None:
                due = self._publisher.decide() if self._generation.lead or self._generation.alone else due
            elif not self._owes and steps.is_due:
                launch = True
                due = self._publisher.decide() if self._generation.lead else due
        return Said(
            has_rows=batch is not None,
            stops=self._life.stopping,
            **self._publications.held._asdict(),
            rows=self._meter.rows,
            flawed=not self._replica.is_finite,
            asked_by=self._asked_by,
            concludes=self._concludes(),
            others_steps=len(self._held),
            generation=self._rendezvous.newest,
            number=self._publications.said,
            launch=launch,
            evaluate=due.evaluate,
            save=due.save,
            stop=due.stop,
        )

    def _act(self, told: list[Said]) -> None:
        """Does what the first member has decided, and what all are ready for."""
        first, rendezvous = told[0], self._rendezvous
        rendezvous.begin_generations(min(said.generation for said in told))
        self._meter.group_rows = int(sum(said.rows for said in told))
        if rendezvous.weighs_anew:
            rendezvous.weighs_anew = False
            self._local.weigh_anew()
        self._give(told)
        due = Decision(bool(first.evaluate), bool(first.save), bool(first.stop))
        if any(due):
            self._publications.queue(int(max(said.number for said in told)) + 1, self._meter.steps, due)
        others_steps = int(min(said.others_steps for said in told))
        for _ in range(others_steps):
            self._land(self._held.pop(0))
        if self._barrier and (others_steps or any(said.pending for said in told)):
            self._see_through()  # before a round: the verdict that others wait for needs this group's part
        self._owes = self._owes or bool(first.launch)
        steps, generation = self._steps, self._generation
        may_launch = steps is not None and not generation.alone and not generation.needs_state
        if self._owes and may_launch and steps is not None and not steps.behind:
            self._owes = False
            steps.launch()
        if not self._barrier:
            self._publications.act([said.held for said in told])

    def holds(self, landed: Landed) -> bool:
        if self._strategy.replicated and landed.round not in self._rounds and self._rendezvous.meets:
            self._held.append(landed)
            return True
        return False

    def consider_round(self) -> None:
        """Takes up what the step put off; members decide on rounds when they meet, and say there what they hold.

        Why before they meet:

        1. group A lands a round with a publication in its last step, group B in a step that is not its last
        2. A takes it up, and waits for the verdict, which needs B's evaluation
        3. B, had it not taken it up when it meets, launches the next round, and waits there for A
        """
        self._publisher.publish_deferred()

    # -- publications -----------------------------------------------------------------------------------------------

    def announcement(self, round: int) -> Note:
        return self._publications.note(round)

    def _see_through(self) -> None:
        """Sees publications through that all members hold: other groups go into no round before.

        Members go on meeting until they have the verdict:

        1. group A, alone, evaluates the joint model
        2. a generation forms: the verdict needs group B too, or word that B was handed the joint state
        3. A hands it over once it has begun that generation, which members do when they meet
        """
        deadline = self._deadline()
        while True:
            self._idle(deadline, "the verdict on an evaluation" if self._publications.awaits else "evaluations to end")
            own = Awaits(*self._publications.held, self._asked_by, self._rendezvous.newest, self._publications.awaits)
            told = [Awaits(*each) for each in self._crew.tell(own)]
            self._rendezvous.begin_generations(min(said.generation for said in told))
            self._give(told)
            what = self._publications.act([said.held for said in told])
            if what in (Agreed.NOTHING, Agreed.UNHEARD) and not any(said.verdict for said in told):
                return
            if what is Agreed.SEE_THROUGH:
                deadline = self._deadline()

    def clear_publications(self) -> None:
        publications, deadline = self._publications, self._deadline()
        while True:
            heard = self._crew.tell([*publications.held, publications.awaits])
            told = [(Held(*held), verdict) for *held, verdict in heard]
            what = publications.act([held for held, _ in told])
            if what in (Agreed.NOTHING, Agreed.UNHEARD) and not any(verdict for _, verdict in told):
                break
            self._idle(deadline, "the last publications")
        publications.close(int(max(held.heard for held, _ in told)))

    def _deadline(self) -> float:
        return self._meter.now() + self._plan.deadlines.conclude_s

    def _idle(self, deadline: float, what: str) -> None:
        """Takes signals for a moment; raises TimedOutError when the deadline has passed."""
        self._inbox.take_signals(IDLE_S)
        if self._meter.now() > deadline:
            raise TimedOutError(
                f"worker {self._plan.worker} waited {self._plan.deadlines.conclude_s:.0f} s for {what}; "
                "look for a worker that hangs, or raise the deadline conclude_s"
            )

    # -- the joint state --------------------------------------------------------------------------------------------

    @property
    def _asked_by(self) -> int:
        asked = self._transfer.asked
        return next(iter(asked)) // self._plan.group_size if asked else -1

    def _give(self, told: Sequence[Said | Awaits]) -> None:
        """Under a barrier strategy all members give away the joint state of the same round, which is this one."""
        if not self._barrier or not self._transfer.asked:
            self._asked_at = self._meter.now()
        elif len({said.asked_by for said in told}) == 1 or self._is_late:
            self._transfer.give(self._rounds.adopted)

    @property
    def _is_late(self) -> bool:
        return self._meter.now() - self._asked_at > GIVE_ANYWAY_S

    @property
    def may_hand_over(self) -> bool:
        """Members give at a meeting; a member that waits in a round for the very peer that asks gives from there."""
        late = bool(self._transfer.asked) and self._is_late
        return late or not (self._barrier and self._rendezvous.together)

    # -- the end ----------------------------------------------------------------------------------------------------

    def dissolve(self) -> None:
        self._owes, self._held = False, []

    def await_others(self, patience_s: float) -> None:
        """Goes on meeting: others may publish, or ask for the joint state, until all are done."""
        deadline, is_async = self._meter.now() + patience_s, self._strategy.timing == "async"
        self._owes = self._owes and is_async  # the coordinator has been told how many rounds there are
        while True:
            self._inbox.take_signals(IDLE_S)
            self._reports.report_if_due()
            told = [Said(*each) for each in self._crew.tell(self._statement(decides=is_async))]
            self._act(told)
            if is_async and self._generation.lead:
                self._exchange.announce({"rows": self._meter.rows_done} | self._publications.note(-1))
            if all(said.concludes and not said.others_steps for said in told):
                self._rendezvous.meets = False
                self._rendezvous.begin_generations(math.inf)
                return
            if self._meter.now() > deadline:
                raise TimedOutError(
                    f"worker {self._plan.worker} waited {patience_s:.0f} s for the others to finish; "
                    "look for a worker that hangs, or raise the deadline finish_s"
                )
