"""Replicas that step by themselves: rounds carry their parameters, or the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from thinwire.exchange.notes import Note
from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot, snapshot_of
from thinwire.parameters import Fragment
from thinwire.strategies import Share
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Batch, Synchronizer
from thinwire.worker.round_trigger import RoundTrigger

MOST_AHEAD = 8
"""Steps that a replica may be ahead of what its gradients land on, divided by the fragments that take turns."""


@final
class LocalSteps(Synchronizer):
    """See `thinwire.worker.ports.Synchronizer`.

    Args:
        goes_on: whether this worker takes further steps.
        gives: whether this worker contributes anything to rounds.
        weigh: the weight of a step's rows.
    """

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        rounds: OpenRounds,
        *,
        trigger: RoundTrigger,
        goes_on: Callable[[], bool],
        gives: Callable[[], bool],
        weigh: Callable[[Batch], float],
    ) -> None:
        self._local, self._generation, self._rounds, self._trigger = local, generation, rounds, trigger
        self._goes_on, self._gives, self._weigh = goes_on, gives, weigh
        self._timing, self._meter = local.strategy.timing, local.meter

    def take(self, batch: Batch, *, takes: bool, together: bool) -> None:
        replica, ahead = self._local.replica, self._local.ahead
        if not takes:
            replica.advance()
        elif together and ahead:
            replica.clip()
            ahead.add(self._weigh(batch))
            replica.take_step()
        else:
            replica.update()

    def pause(self) -> None:
        """Waits where a round takes so many steps that its gradients would be of another model by the time it lands."""
        if self._local.ahead and self._trigger.steps >= max(2, MOST_AHEAD // self._local.joint.cuts.newest.count):
            self._rounds.wait_for_newest()

    # -- launching --------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether as many rounds are under way as may be at once."""
        return self._rounds.next >= self._rounds.adopted + self._local.strategy.in_flight

    @property
    def is_due(self) -> bool:
        """Whether the strategy asks for the next round."""
        return self._local.strategy.due(self._trigger.progress(self._rounds.next, self._generation.lead))

    def launch_if_due(self) -> None:
        generation, rounds, behind = self._generation, self._rounds, self.behind
        if behind and self._timing == "barrier" and not generation.needs_state:
            # this worker joined a round before it had anything to contribute
            rounds.wait_until_landed(lambda: generation.alone)
            behind = generation.alone
        if not generation.needs_state and not behind and self._goes_on() and self.is_due:
            self.launch()

    def launch(self) -> None:
        """Contributes to the next round what was done since its fragment was last contributed."""
        local, rounds, meter, ahead = self._local, self._rounds, self._meter, self._local.ahead
        if self._timing == "async" and not local.shares.has_any(meter.steps):
            return  # servers want nothing from a replica that has just started from their model
        round, fragment = rounds.claim()
        share = Share(round, *local.shares.take(fragment, meter.steps, meter.rows_done), self._generation.lead)
        worked = share.steps > 0 and self._gives()
        began = meter.now()
        values, more = local.replica.vector, Note()
        if ahead and worked:
            values, more = ahead.sum, ahead.note(fragment, meter.steps)
            worked = bool(more)
        snapshot = snapshot_of(fragment.of(values).detach(), rounds.spares) if worked else None
        waits = local.waits(round)
        if snapshot is not None and (waits or ahead):
            snapshot.settle()
        if snapshot is not None and ahead:
            ahead.sent(fragment)
        meter.handled(meter.now() - began, fragment.size / local.joint.size)
        rounds.launch(round, fragment, snapshot, local.strategy.weight(share) if worked else 0.0, note=more)
        self._trigger.launched()
        if waits:
            rounds.wait_for(round)
            self._trigger.go_on()

    def finish(self) -> None:
        """Contributes steps made since the last round, fragment by fragment, unless rounds never pause."""
        local, generation = self._local, self._generation
        if local.ahead:
            self._send_sums()
        if self._timing != "overlap" and not generation.alone and self._trigger.steps > 0:
            for _ in range(local.joint.cuts.newest.count):
                self.launch()
            self._rounds.wait_for_all("its last exchange")

    def _send_sums(self) -> None:
        """Sends gradients that are in no joint model yet: each fragment gets another round."""
        local, generation = self._local, self._generation
        for _ in range(local.joint.cuts.newest.count):
            self._rounds.wait_for_all("its last rounds", and_also=lambda: not generation.needs_state)
            if generation.alone or not local.ahead or not local.ahead.has_any:
                return
            self.launch()
        self._rounds.wait_for_all("its last exchange")

    # -- landing ----------------------------------------------------------------------------------------------------

    def land(self, landed: Landed, fragment: Fragment, snapshot: Snapshot | None) -> None:
        local, meter = self._local, self._meter
        contributed = snapshot is not None and landed.snapshot is None
        base = snapshot.take() if snapshot is not None and contributed else landed.snapshot
        began = meter.now()
        if local.ahead:
            local.ahead.land(fragment, landed.reply, meter.steps)
            spare = base if snapshot is not None else None
        elif base is not None:
            near = snapshot.near if snapshot is not None and contributed else None
            with torch.no_grad():
                local.state.adopt(fragment, local.replica.vector, base if near is None else near, landed.reply)
            # a strategy without a state may have contributed the snapshot itself
            spare = base if landed.snapshot is None and near is None and local.joint.state else None
        else:
            return
        meter.handled(meter.now() - began, fragment.size / local.joint.size)
        if spare is not None:
            self._rounds.spares.give(spare)
