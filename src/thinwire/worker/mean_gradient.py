"""Steps by the mean of all workers' gradients: replicas never differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.strategies import Share
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Batch, Synchronizer


@final
class MeanGradient(Synchronizer):
    """See `thinwire.worker.ports.Synchronizer`; each step is a round.

    A parameter takes a step where any worker has a gradient of it; a worker that has none counts as zero.
    """

    def __init__(
        self, local: LocalModel, generation: Generation, rounds: OpenRounds, weigh: Callable[[Batch], float]
    ) -> None:
        self._local, self._generation, self._rounds, self._weigh = local, generation, rounds, weigh
        self._mean: Tensor | None = None
        self._empty = False
        self._absent: frozenset[int] = frozenset()
        """Parameters, by number, of which no worker has a gradient in that mean: they take no step."""
        self._awaited = -1
        """The round whose mean the step under way waits for; below 0 for none."""

    @property
    def mid_step(self) -> bool:
        return self._mean is not None

    def take(self, batch: Batch, *, takes: bool, together: bool) -> None:
        """Takes the step of the mean; a step that is not finite here contributes nothing to it.

        There is no step where no worker contributes, nor where a peer's state comes instead that has this step in it.
        """
        replica = self._local.replica
        if not together:
            if takes:
                replica.update()
            else:
                replica.advance()
            return
        self._contribute(batch, takes=takes)
        if self._mean is None:
            return
        if self._empty:
            replica.advance()
        else:
            self._step(self._mean)
        self._mean = None

    def _contribute(self, batch: Batch, *, takes: bool) -> None:
        round, fragment = self._rounds.claim()
        replica = self._local.replica
        if takes:
            gradient = torch.zeros_like(replica.vector)  # the padding between parameters counts in every block's scale
            replica.parameters.gather_gradients(gradient)
            share = Share(round, 1, self._weigh(batch), self._generation.lead)
            weight, absent = self._local.strategy.weight(share), replica.parameters.absent()
            self._rounds.launch(round, fragment, Snapshot(gradient, gradient.cpu()), weight, note={"absent": absent})
        else:
            self._rounds.launch(round, fragment, None, 0.0)
        self._awaited = round
        try:
            self._rounds.wait_for(round)
        finally:
            self._awaited = -1

    def _step(self, mean: Tensor) -> None:
        replica = self._local.replica
        replica.parameters.scatter_gradients(mean.to(replica.vector.device), self._absent)
        replica.update()

    def land(self, landed: Landed, fragment: Fragment, snapshot: Snapshot | None) -> None:
        self._mean, self._empty = landed.reply, landed.empty
        self._absent = absent_from(landed.notes.values())
        if self._awaited == landed.round:
            return
        if landed.empty:
            self._mean = None
            self._local.replica.advance()
        elif snapshot is None:  # this worker's rows are done: it takes the other workers' steps
            self._mean = None
            self._step(landed.reply)

    def drop(self) -> None:
        self._mean = None


def absent_from(notes: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """The parameters, by number, of which none that contributed to a round has a gradient.

    >>> sorted(absent_from([{"absent": [1, 2]}, {"absent": [2]}, {"rows": 5}]))
    [2]
    """
    said = [frozenset[int](note["absent"]) for note in notes if "absent" in note]
    return frozenset.intersection(*said) if said else frozenset()
