"""How the members of a group come together: at the start, and again when the group was broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

from thinwire.errors import LostWorkersError
from thinwire.exchange.ports import Exchange
from thinwire.exchange.signals import Formed, GroupBrokenError
from thinwire.protocol import messages
from thinwire.protocol.observation import GroupLeft
from thinwire.worker.generation import Generation
from thinwire.worker.group_publications import GroupPublications
from thinwire.worker.inbox import Inbox
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.ports import Batches, PartOfReplica
from thinwire.worker.reports import Reports

PATIENCE = 4
"""How long a member waits for another member, who may await a peer, in multiples of `silence_s`."""


@final
class GroupRendezvous:
    """See `thinwire.worker.ports.Rendezvous`.

    Args:
        form: begins a generation.
        abandon: drops the step under way.
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
        inbox: Inbox,
        reports: Reports,
        publications: GroupPublications,
        form: Callable[[Formed], None],
        abandon: Callable[[], None],
    ) -> None:
        self._plan, self._local, self._generation, self._replica = plan, local, generation, replica
        self._batches, self._exchange, self._rounds, self._inbox = batches, exchange, rounds, inbox
        self._reports, self._publications, self._form, self._abandon = reports, publications, form, abandon
        self._timing, self._deadlines = local.strategy.timing, plan.deadlines
        self._call: dict[str, Any] | None = None
        """The newest call of the coordinator to come together, until members do."""
        self._meeting = self._met = 0
        """The newest meeting of its group that this worker has heard of, and the last one that it was at."""
        self._apart, self.together = True, False
        """Whether the group is broken, or not whole yet; and whether its members have agreed on how far they are."""
        self.again = False
        self._caught_up = False
        self._known: set[int] = set()
        """Members of the last generation, of whose rows this worker has heard."""
        self._held: list[Formed] = []
        """Generations that members have yet to begin together: a step is of the same one for all."""
        self.meets = False
        """Whether members meet before each step."""
        self.weighs_anew = False
        """Whether contributions count by what the group does from its next meeting on alone."""

    @property
    def replaces_joint(self) -> bool:
        return self._generation.alone or any(len(formed.members) < 2 or formed.restart for formed in self._held)

    @property
    def sent_bytes(self) -> int:
        return self._replica.crew.sent_bytes

    # -- generations ------------------------------------------------------------------------------------------------

    def take(self, formed: Formed) -> None:
        if formed.group["n"] == self._meeting and self.meets and self._timing != "async":
            self._held.append(formed)
            # a joint state that is on its way may come before the next meeting
            self._generation.needs_state = formed.needs_state
        else:
            self.begin_generations(math.inf)  # in the order in which they formed
            self._begin_generation(formed)

    def begin_generations(self, last: float) -> None:
        """Begins those that members hold, up to the number that all of them have heard of."""
        while self._held and self._held[0].generation <= last:
            # the joint state may have come since
            self._begin_generation(self._held.pop(0)._replace(needs_state=self._generation.needs_state))

    @property
    def newest(self) -> int:
        """The newest generation that this member has heard of."""
        return self._held[-1].generation if self._held else self._generation.number

    def _begin_generation(self, formed: Formed) -> None:
        self._form(formed)
        generation, size = self._generation, self._plan.group_size
        of = {w: sum(formed.totals.get(w - w % size + p, 0) for p in range(size)) for w in formed.members}
        heard = generation.rows
        generation.rows = {w: max(rows, heard.get(w, 0) if w in self._known else 0) for w, rows in of.items()}
        self._known = set(of)
        if self._timing == "barrier" and self._apart and formed.needs_state:
            # the other members may still wait for their joint state when this one has come
            self._exchange.follow(math.inf)
        if formed.group["n"] != self._meeting:
            self._meeting, self._call = formed.group["n"], formed.group
            self._caught_up = False
            if not self._apart:
                raise GroupBrokenError("its group comes together anew")

    def catch_up(self) -> None:
        self._caught_up = True

    # -- parting ----------------------------------------------------------------------------------------------------

    def lose_member(self) -> None:
        if not self._apart:
            raise GroupBrokenError("a worker of its group was lost")

    def part_ways(self, why: GroupBrokenError) -> None:
        """Whatever was under way in the group is over.

        Other groups may wait in a round for this worker, and its own group for a joint state that they have:

        1. worker 0 of group A waits in a round for worker 2 of group B, whose fellow 3 was replaced
        2. worker 2 waits for worker 3, which waits for the joint state of worker 1
        3. worker 1 gives it when it meets worker 0
        """
        local, rounds = self._local, self._rounds
        local.joint.observe(GroupLeft())
        self._replica.crew.disband()
        self._apart, self.again, self.together, self.meets = True, True, False, False
        self.begin_generations(math.inf)
        self._abandon()
        self._exchange.follow(math.inf if self._timing == "barrier" else 0)
        if local.strategy.replicated:
            rounds.clear()  # rounds that land from now on are steps of other groups
            if rounds.adopted < rounds.landed:  # a mean has come, and the step that it is for was broken off
                self._exchange.estrange()
        # the last meeting that this worker was at: a newer one may well succeed
        self._reports.say(messages.Apart, meeting=self._met, why=str(why))

    # -- coming together --------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        local, deadlines = self._local, self._deadlines
        patience_s = deadlines.finish_s if self.again else deadlines.join_s
        self._inbox.wait(lambda: self._call is not None, "its group to come together", patience_s)
        assert self._call is not None
        call, self._call = self._call, None
        self._met = int(call["n"])
        name = f"group-{self._plan.worker // self._plan.group_size}-{call['n']}"
        self._replica.crew.form(str(call["at"]), name, PATIENCE * deadlines.silence_s)
        self._apart, self.together = False, False
        self._inbox.wait(lambda: not self._generation.needs_state, "the joint model", deadlines.join_s)
        # a worker that is alone in its lane is the joint model
        kept = self._caught_up or self._timing == "async" or self._generation.alone
        if self.again and not kept and local.joint.model is not None:
            local.copy_joint()
            local.open()
        self._align()
        resumed = local.origin is Origin.CHECKPOINT
        if resumed:
            local.origin = Origin.NEW
        self.weighs_anew, self.again = not resumed, False
        self._replica.stand_in(next(iter(self._batches.training((0, 0), None))))
        return resumed

    def _align(self) -> None:
        """Members agree on how far they are; under a barrier strategy they are equally far in rounds."""
        meter = self._local.meter
        told = self._listen([meter.steps, self._publications.heard])
        self.together = True
        if self.again and self._generation.alone and len({steps for steps, _ in told}) > 1:
            raise LostWorkersError("the group broke in the middle of a step, and no other replica has the joint model")
        meter.steps = self._replica.steps = int(max(steps for steps, _ in told))
        over = int(max(number for _, number in told))
        self._publications.pass_over(over)
        if self.again or self._caught_up:
            self._reports.say(messages.Caught, published=over)
        if self._timing == "barrier":
            self._align_rounds()

    def _align_rounds(self) -> None:
        """Members stop following rounds of other groups where all have landed equally many.

        A member that is behind launches the rounds that it lacks, with no contribution. Groups that are in the middle
        of such a round contribute to it as well. Where no such group is left, the round lands with nothing in it, and
        part of the model misses one step:

        1. a member of group A breaks off its step after member 0 has launched round 32; member 1 never launches it
        2. groups B and C have done their rows: in each lane they follow the rounds of A
        3. round 32 lands in lane 0, and lane 1 would count one round less from then on

        Members of B and C take a step once they hold a round of each lane. They would take round 33 of lane 0 together
        with round 32 of lane 1, and hear of a publication in one lane before the other: A waits there for their part.
        """
        rounds, now = self._rounds, self._local.meter.now
        until = now() + self._deadlines.silence_s
        while True:
            self._stop_following()
            told = self._listen([rounds.landed, now() > until])
            most = int(max(landed for landed, _ in told))
            if all(landed == most for landed, _ in told) or any(late for _, late in told):
                return
            while rounds.next < most:
                rounds.launch_nothing()
            while rounds.landed < most and now() <= until:
                self._inbox.take_signals(0.1)

    def _stop_following(self) -> None:
        """Follows no further round, and waits until those that it has followed have landed."""
        exchange, round_s, last = self._exchange, self._deadlines.round_s, -1
        while last != exchange.next_round:
            last = exchange.next_round
            exchange.follow(last, in_step=True)
            until = lambda last=last: exchange.follows_until == last  # noqa: E731
            self._inbox.wait(until, "its exchange", round_s)
        self._inbox.wait(lambda: self._rounds.landed >= last, "rounds", round_s)

    def _listen(self, said: list[float]) -> list[list[float]]:
        """What all members say, some of which may still wait for a joint state; peers may ask for this one's."""
        pending = self._replica.crew.telling(said)
        self._inbox.wait(lambda: pending.done, "the others of its group", self._deadlines.join_s)
        return [piece.tolist() for piece in pending.wait()]
