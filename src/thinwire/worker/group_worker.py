"""A worker that holds a part of a replica: it steps together with the others of its group, or not at all.

Before each step the members of a group meet: each says how far it is, and the first decides for all whether a round is
due, what is to be published, and when to stop. Everything else a member does as a worker alone does, along its lane.
What breaks a group, a member that is gone above all, ends the step they were in; when the group is whole again, its
members start from the joint model, as newcomers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from thinwire.errors import LostWorkersError, TimedOutError
from thinwire.exchange.signals import Formed, GroupBrokenError, Landed, Signal
from thinwire.protocol import messages
from thinwire.protocol.forms import Body
from thinwire.protocol.observation import GroupLeft
from thinwire.worker.group_publisher import Agreed, GroupPublisher, Held
from thinwire.worker.worker import REPORT_S, Worker

WEIGHT = 1
"""Where in what members say at a meeting the weight of their rows is; their number is before it."""
IDLE_S = 0.02
PATIENCE = 4
"""Times the silence after which a worker counts as lost: so long a member waits for another, who may await a peer."""
GIVE_ANYWAY_S = 2.0
"""How long a joint state that a peer asked for is held back until the fellows are asked for theirs."""


class Said(NamedTuple):
    """What a member says at a meeting, beside its rows and their weight."""

    has_rows: float
    stops: float
    heard: float
    pending: float
    ready: float
    evaluates: float
    saves: float
    """These five are `Held`."""
    rows: float
    """Done so far."""
    flawed: float
    """Whether its parameters are not finite."""
    asked_by: float
    """The group of the peer that asks for the joint state; below 0 for none."""
    concludes: float
    others_steps: float
    """Steps of other groups that it has yet to take."""
    generation: float
    """The newest that it has heard of."""
    number: float
    """The last publication that it has heard of or is about to announce; what follows the first member decides."""
    launch: float
    evaluate: float
    save: float
    stop: float

    @property
    def held(self) -> Held:
        return Held(self.heard, self.pending, self.ready, self.evaluates, self.saves)


class Awaits(NamedTuple):
    """What a member says while publications are seen through."""

    heard: float
    pending: float
    ready: float
    evaluates: float
    saves: float
    """These five are `Held`."""
    asked_by: float
    generation: float
    verdict: float
    """Whether it waits for one."""

    @property
    def held(self) -> Held:
        return Held(*self[: len(Held._fields)])


class GroupWorker(Worker):
    """One member of a group."""

    publishes = GroupPublisher
    publisher: GroupPublisher

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._crew = self.replica.crew
        self._first = self.plan.worker % self.plan.group_size == 0
        self._call: dict[str, Any] | None = None
        self._meeting = self._met = 0
        """The newest meeting of its group that it has heard of, and the last one that it was at."""
        self._apart, self._again, self._together = True, False, False
        self._owes = self._idle = self._caught_up = False
        self._of_group = self._in_step = 0
        self._weighs_anew = False
        """Whether what the group does from its next meeting on is all that its contributions count by."""
        self._weight_in_step = 0.0
        self._asked_at = 0.0
        self._known: set[int] = set()
        self._held: list[Landed] = []
        """Means of others' gradients, which members take their steps on together."""
        self._news: list[Formed] = []
        """Generations that members have yet to begin together: a step is of the same one for all."""
        self._meets = False

    def run(self) -> None:
        self.exchange.start(self.replica.parameters.digest())
        while True:
            try:
                self._begin()
                self._train()
                self._finish()
                return
            except GroupBrokenError as broken:
                self._part_ways(broken)

    @property
    def replica_replaces_joint(self) -> bool:
        return self.alone or any(len(formed.members) < 2 or formed.restart for formed in self._news)

    # -- coming together --------------------------------------------------------------------------------------------

    def _take(self, signal: Signal) -> None:
        same = isinstance(signal, Formed) and signal.group["n"] == self._meeting
        if isinstance(signal, Formed) and same and self._meets and not self._async:
            self._news.append(signal)
            self._needs_state = signal.needs_state  # what the exchange waits for does not wait for the next meeting
        else:
            if isinstance(signal, Formed):
                self._begin_generations(math.inf)  # in the order in which they formed
            super()._take(signal)

    def _begin_generations(self, last: float) -> None:
        while self._news and self._news[0].generation <= last:
            self._form(self._news.pop(0)._replace(needs_state=self._needs_state))  # the state may have come meanwhile

    def _form(self, formed: Formed) -> None:
        super()._form(formed)
        size = self.plan.group_size
        of = {w: sum(formed.totals.get(w - w % size + p, 0) for p in range(size)) for w in formed.members}
        self.totals = {w: max(rows, self.totals.get(w, 0) if w in self._known else 0) for w, rows in of.items()}
        self._known = set(of)
        if self._barrier and self._apart and formed.needs_state:
            self.exchange.follow(math.inf)  # also once its state has come: fellows may still wait for theirs
        if formed.group["n"] != self._meeting:
            self._meeting, self._call = formed.group["n"], formed.group
            self._caught_up = False
            if not self._apart:
                raise GroupBrokenError("its group comes together anew")

    def _hear(self, body: Body) -> None:
        if not isinstance(body, messages.Stand):
            super()._hear(body)
        elif not self._apart:
            raise GroupBrokenError("a worker of its group was lost")

    def _part_ways(self, why: GroupBrokenError) -> None:
        """The group is broken: whatever was under way in it is over."""
        self.joint.observe(GroupLeft())
        self._crew.disband()
        self._apart, self._again, self._together = True, True, False
        self._meets = False
        self._begin_generations(math.inf)
        self._owes = self._finished = False
        self.mean_gradient = None
        self._held = []
        if self.served and (abandoned := self.served.abandon()) is not None:
            self._snapshots.pop(abandoned, None)
        # Other groups may wait in a round for this worker, and its own group for a joint state that they have:
        # 1. worker 0 of group A waits in a round for worker 2 of group B, whose fellow 3 was replaced
        # 2. worker 2 waits for worker 3, which waits for the joint state of worker 1
        # 3. worker 1 gives it when it meets worker 0
        self.exchange.follow(math.inf if self._barrier else 0)
        if self.strategy.replicated:
            self._snapshots.clear()  # what lands from now on is a step of others
            if self.adopted < self.landed:  # a mean has come that this worker has not stepped on
                self.exchange.estrange()
        self.say(
            messages.Apart, meeting=self._met, why=str(why)
        )  # of a newer meeting nothing is known yet: it may well succeed

    @property
    def _new(self) -> bool:
        return super()._new or self._again

    def _catch_up(self, caught: Any) -> None:
        super()._catch_up(caught)
        self._caught_up = True

    def _begin(self) -> None:
        patience = self.plan.deadlines.finish_s if self._again else self.plan.deadlines.join_s
        self.wait(lambda: self._call is not None, "its group to come together", patience)
        assert self._call is not None
        call, self._call = self._call, None
        self._met = int(call["n"])
        group = self.plan.worker // self.plan.group_size
        patience = PATIENCE * self.plan.deadlines.silence_s
        self._crew.form(str(call["at"]), f"group-{group}-{call['n']}", patience)
        self._apart, self._together = False, False
        self.wait(lambda: not self._needs_state, "the joint model", self.plan.deadlines.join_s)
        kept = self._caught_up or self._async or self.alone  # who is alone in its lane is the joint model
        if self._again and not kept and self.joint.model is not None:
            with torch.no_grad():
                self.replica.vector.copy_(self.joint.model)
            self.open_state()
        self._align()
        if not self.loaded:
            self.pace.start(self.meter.steps)
        self._weighs_anew = not self.loaded
        self._again = self.loaded = False
        self.replica.stand_in(next(iter(self.batches.training((0, 0), None))))

    def _align(self) -> None:
        """Members agree on how far they are; under a barrier strategy they are equally far in rounds."""
        told = self._listen([self.meter.steps, self.publisher.number])
        self._together = True
        if self._again and self.alone and len({steps for steps, _ in told}) > 1:
            raise LostWorkersError("the group broke in the middle of a step, and no other replica has the joint model")
        self.meter.steps = self.replica.steps = int(max(steps for steps, _ in told))
        over = int(max(number for _, number in told))
        self.publisher.pass_over(over)
        if self._again or self._caught_up:
            self.say(messages.Caught, published=over)
        if self._barrier:
            self._align_rounds()

    def _align_rounds(self) -> None:
        """Members stop following rounds of other groups where all have landed equally many.

        Those behind catch up first. Where nobody is left to launch the round that they lack, lanes stay apart by one:
        each lane counts its rounds by itself, and part of the model has missed one step.
        """
        until = self.time.now() + self.plan.deadlines.silence_s
        while True:
            self._stop_following()
            told = self._listen([self.landed, self.time.now() > until])
            most = int(max(landed for landed, _ in told))
            if all(landed == most for landed, _ in told) or any(late for _, late in told):
                return
            if self.landed < most:
                self.exchange.follow(most, in_step=True)
                while self.landed < most and self.time.now() <= until:
                    self._take_signals(0.1)

    def _stop_following(self) -> None:
        """Follows no further round, and waits until those that it has followed have landed."""
        last = -1
        while last != self.exchange.next_round:
            last = self.exchange.next_round
            self.exchange.follow(last, in_step=True)
            until = lambda last=last: self.exchange.follows_until == last  # noqa: E731
            self.wait(until, "its exchange", self.plan.deadlines.round_s)
        self.wait(lambda: self.landed >= last, "rounds", self.plan.deadlines.round_s)

    def _listen(self, said: list[float]) -> list[list[float]]:
        """What members say who may still wait for a joint state, while peers may ask for this one's."""
        pending = self._crew.telling(said)
        self.wait(lambda: pending.done, "the others of its group", self.plan.deadlines.join_s)
        return [piece.tolist() for piece in pending.wait()]

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        feed = iter(self.batches.training(self.meter.position, self.plan.epochs))
        self._meets = True
        while True:
            if not self.exchange.quiet:
                self._take_signals(0.0)
            batch = next(feed, None) if self._goes_on() else None
            met = self.replica.meet(batch, *self._words(batch))
            told = [Said(*each[2:]) for each in met]
            self._weight_in_step = sum(each[WEIGHT] for each in met)
            self._in_step = sum(int(n) for n, said in zip(self._crew.rows, told, strict=True) if said.has_rows)
            if any(said.flawed for said in told):
                self.nonfinite.start_anew("its parameters were not finite any more")
            if not self._in_step or any(said.stops for said in told):
                break
            self._act(told)
            self._idle = batch is None
            self._step(self.replica.spare if batch is None else batch)
        if self._barrier:
            self._see_through()

    def _see_through(self) -> None:
        """Sees publications through that all members hold: other groups go into no round before.

        Members go on meeting until they have the verdict:

        1. group A, alone, evaluates the joint model
        2. a generation forms: the verdict needs group B too, or word that B was handed the joint state
        3. A hands it over once it has begun that generation, which members do when they meet
        """
        deadline = self.time.now() + self.plan.deadlines.conclude_s
        while True:
            self.idle(deadline, "the verdict on an evaluation" if self.publisher.awaits else "evaluations to end")
            told = [Awaits(*each) for each in self._crew.tell(self._waiting())]
            self._begin_generations(min(said.generation for said in told))
            self._give(told)
            what = self.publisher.act([said.held for said in told])
            if what in (Agreed.NOTHING, Agreed.UNHEARD) and not any(said.verdict for said in told):
                return
            if what is Agreed.SEE_THROUGH:
                deadline = self.time.now() + self.plan.deadlines.conclude_s

    def _waiting(self) -> Awaits:
        return Awaits(*self.publisher.held, self._asked_by, self._newest, self.publisher.awaits)

    @property
    def _asked_by(self) -> int:
        asked = self._handover.asked
        return next(iter(asked)) // self.plan.group_size if asked else -1

    @property
    def _newest(self) -> int:
        return self._news[-1].generation if self._news else self.generation

    def idle(self, deadline: float, what: str) -> None:
        """Takes signals for a moment; raises TimedOutError when the deadline has passed."""
        self._take_signals(IDLE_S)
        if self.time.now() > deadline:
            raise TimedOutError(
                f"worker {self.plan.worker} waited {self.plan.deadlines.conclude_s:.0f} s for {what}; "
                "look for a worker that hangs, or raise the deadline conclude_s"
            )

    def _words(self, batch: Any | None = None, *, decides: bool = True) -> Said:
        launch, what = False, (False, False, False)
        if self._first and decides:
            if self.alone or self.gradients:
                what = self.publisher.decide() if self.lead or self.alone else what
            elif not self._owes and self.strategy.due(self.pace.progress(self.exchange.next_round, self.lead)):
                launch = True
                what = self.publisher.decide() if self.lead else what
        return Said(
            has_rows=batch is not None,
            stops=self._stopping,
            **self.publisher.held._asdict(),
            rows=self.meter.rows,
            flawed=not self.replica.is_finite,
            asked_by=self._asked_by,
            concludes=self._concludes(),
            others_steps=len(self._held),
            generation=self._newest,
            number=self.publisher.said,
            launch=launch,
            evaluate=what[0],
            save=what[1],
            stop=what[2],
        )

    def _act(self, told: list[Said]) -> None:
        """Does what the first member has decided, and what all are ready for."""
        first = told[0]
        self._begin_generations(min(said.generation for said in told))
        self._of_group = int(sum(said.rows for said in told))
        if self._weighs_anew:
            self._weighs_anew = False
            self.weigh_anew()
        self._give(told)
        if first.evaluate or first.save or first.stop:
            number = int(max(said.number for said in told)) + 1
            self.publisher.queue(number, self.meter.steps, bool(first.evaluate), bool(first.save), bool(first.stop))
        others_steps = int(min(said.others_steps for said in told))
        for _ in range(others_steps):
            super()._land(self._held.pop(0))
        if self._barrier and (others_steps or any(said.pending for said in told)):
            self._see_through()  # before a round is launched: the verdict that others wait for needs this group's part
        self._owes = self._owes or bool(first.launch)
        if self._owes and not self.alone:
            behind = self.exchange.next_round >= self.adopted + self.strategy.in_flight
            if not self._needs_state and not behind:
                self._owes = False
                self._launch(self.replica.vector)
        if not self._barrier:
            self.publisher.act([said.held for said in told])

    def _land(self, landed: Landed) -> None:
        if self.strategy.replicated and landed.round not in self._snapshots and self._meets:
            self._held.append(landed)
        else:
            super()._land(landed)

    def _give(self, told: Sequence[Said | Awaits]) -> None:
        """Under a barrier strategy fellows give away states of the same round, which is this one."""
        if not self._barrier or not self._handover.asked:
            self._asked_at = self.time.now()
        elif len({said.asked_by for said in told}) == 1 or self.time.now() - self._asked_at > GIVE_ANYWAY_S:
            self._handover.give(self.adopted)

    def _hand_over(self) -> None:
        """Fellows give at a meeting; one that waits in a round for the very peer that asks gives from there."""
        late = bool(self._handover.asked) and self.time.now() - self._asked_at > GIVE_ANYWAY_S
        if late or not (self._barrier and self._together):
            super()._hand_over()

    def _waits(self, round: int) -> bool:
        return self._barrier

    def _consider_round(self) -> None:
        """Takes up what the step put off; members decide on rounds when they meet, and say there what they hold.

        Why before they meet:

        1. group A lands a round with a publication in its last step, group B in a step that is not its last
        2. A takes it up, and waits for the verdict, which needs B's evaluation
        3. B, had it not taken it up when it meets, launches the next round, and waits there for A
        """
        self.publisher.publish_deferred()

    @property
    def rows_done(self) -> int:
        return max(self._of_group, self.meter.rows)

    def _weight_of(self, batch: Any) -> float:
        return self._weight_in_step

    def _book(self, begun: float, batch: Any, loss: float) -> None:
        if not self._idle:
            super()._book(begun, batch, loss)
            return
        now = self.meter.end_step(begun, 0, loss, self.meter.position)
        if now - self._reported > REPORT_S:
            self._report(now)

    def _report(self, now: float) -> None:
        self.exchange.sent_aside(self._crew.sent_bytes)
        super()._report(now)

    def _await_others(self, patience_s: float) -> None:
        """Goes on meeting: others may publish, or ask for the joint state, until all are done."""
        deadline = self.time.now() + patience_s
        self._owes = self._owes and self._async  # the coordinator has been told how many rounds there are
        while True:
            self._take_signals(IDLE_S)
            if self.time.now() - self._reported > REPORT_S:
                self._report(self.time.now())
            told = [Said(*each) for each in self._crew.tell(self._words(decides=self._async))]
            self._act(told)
            if self._async and self.lead:
                self.exchange.announce(self._account() | self.publisher.note(-1))
            if all(said.concludes and not said.others_steps for said in told):
                self._meets = False
                self._begin_generations(math.inf)
                return
            if self.time.now() > deadline:
                raise TimedOutError(
                    f"worker {self.plan.worker} waited {patience_s:.0f} s for the others to finish; "
                    "look for a worker that hangs, or raise the deadline finish_s"
                )
