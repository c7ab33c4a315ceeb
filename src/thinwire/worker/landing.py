"""What a round that has landed does at a worker."""

from __future__ import annotations

from typing import final

from thinwire.exchange.signals import Landed
from thinwire.worker.comparison import Comparison
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Synchronizer
from thinwire.worker.publisher import Publisher
from thinwire.worker.tuner import Tuner


@final
class Landing:
    """Gives a round's reply to the replica, and its notes to each collaborator that reads them."""

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        rounds: OpenRounds,
        *,
        synchronizer: Synchronizer,
        tuner: Tuner,
        comparison: Comparison,
        publisher: Publisher,
    ) -> None:
        self._local, self._generation, self._rounds, self._synchronizer = local, generation, rounds, synchronizer
        self._tuner, self._comparison, self._publisher = tuner, comparison, publisher

    def land(self, landed: Landed) -> None:
        """A round has landed."""
        fragment, snapshot = self._rounds.land(landed.round, landed.fragment)
        self._tuner.see(landed)
        self._comparison.see(landed)
        if not self._comparison.learns_alone and landed.round >= self._local.since:
            self._synchronizer.land(landed, fragment, snapshot)
        self._generation.hear_round(landed.notes)
        mid_step = self._synchronizer.mid_step
        if not mid_step:
            self._rounds.adopted = self._rounds.landed
        self._publisher.see(landed, mid_step=mid_step)
