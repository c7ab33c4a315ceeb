"""A gradient on its way to table servers, tuple by tuple, as backward produces it (SINGA §5.3).

The last layers' gradients are there first. They travel, and their new parameters come back, while those of the first
layers are still being computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from thinwire.exchange.ports import RoundsPort
from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.strategies import Share
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.ports import Batch, Replica, Synchronizer
from thinwire.worker.round_trigger import RoundTrigger


@final
class GradientStream:
    """Watches a replica's gradients, and reports each tuple that is whole between `begin` and `end`."""

    def __init__(self, replica: Replica, tuples: Sequence[Fragment], *, together: bool) -> None:
        self._replica, self._tuples = replica, tuples
        spec = replica.spec
        self._waits = together or spec.clip_norm is not None or spec.accumulate > 1 or spec.precision == "float16"
        """Whether nothing is sent before all of the gradient is known."""
        self.values = torch.zeros(replica.parameters.size)
        self._feed: Callable[[list[int], frozenset[int]], None] | None = None
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._touched: list[list[int]] = []
        parameters = replica.parameters
        for offset, tensor in zip(parameters.offsets, parameters.tensors, strict=True):
            stop = offset + tensor.numel()
            self._touched.append([k for k, t in enumerate(tuples) if t.start < stop and offset < t.stop])
        self._parts = [sum(key in keys for keys in self._touched) for key in range(len(tuples))]
        for index, tensor in enumerate(parameters.tensors):
            tensor.register_post_accumulate_grad_hook(functools.partial(self._made, index))  # type: ignore[no-untyped-call]

    def begin(self, feed: Callable[[list[int], frozenset[int]], None]) -> None:
        """From here on `feed` is given tuples whose values no longer change."""
        self.values = torch.zeros(self._replica.parameters.size)
        self._feed, self._missing, self._seen = feed, list(self._parts), set()

    def end(self, *, takes: bool) -> None:
        """Backward is over: parameters that it did not touch have no gradient. What had to wait is sent now."""
        if takes and self._waits:
            self._replica.clip()
            self._replica.parameters.gather_gradients(self.values)
        for index, tensor in enumerate(self._replica.parameters.tensors):
            if index not in self._seen and tensor.grad is not None:  # a gradient that autograd did not make
                offset = self._replica.parameters.offsets[index]
                self.values[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor.grad.to_dense())
        rest = [key for key, missing in enumerate(self._missing) if missing or not self._parts[key]]
        if self._feed is not None and rest:
            self._feed(rest, frozenset(self._replica.parameters.absent()))
        self._feed = None

    def drop(self) -> None:
        """Backward has broken off: nothing more is reported."""
        self._feed = None

    def _made(self, index: int, parameter: Tensor) -> None:
        late = self._feed is None or index in self._seen
        if late or parameter.grad is None or self._waits:
            return
        self._seen.add(index)
        offset = self._replica.parameters.offsets[index]
        self.values[offset : offset + parameter.numel()].view(parameter.shape).copy_(parameter.grad.to_dense())
        whole = []
        for key in self._touched[index]:
            self._missing[key] -= 1
            if not self._missing[key]:
                whole.append(key)
        if whole and self._feed is not None:
            self._feed(whole, frozenset())


@final
class ServedGradients(Synchronizer):
    """See `thinwire.worker.ports.Synchronizer`; a server's optimizer takes the steps, and sends the parameters back.

    Args:
        leave_out: what is told of a round whose step is not taken.
        weigh: the weight of a step's rows.
        together: whether members of a group step together.
    """

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        rounds: OpenRounds,
        *,
        exchange: RoundsPort,
        trigger: RoundTrigger,
        leave_out: Callable[[int], None],
        weigh: Callable[[Batch], float],
        together: bool,
    ) -> None:
        self._local, self._generation, self._rounds, self._exchange = local, generation, rounds, exchange
        self._trigger, self._leave_out, self._weigh = trigger, leave_out, weigh
        self._stream = GradientStream(local.replica, exchange.tuples, together=together)
        self._making = -1
        """The round whose gradient is being made; below 0 for none."""

    def begin(self, batch: Batch) -> None:
        strategy, replica = self._local.strategy, self._local.replica
        rows = self._weigh(batch)
        round, fragment = self._rounds.claim()
        self._stream.begin(functools.partial(self._exchange.feed, round))
        values = Snapshot(self._stream.values, self._stream.values)
        weight = strategy.weight(Share(round, 1, rows, self._generation.lead))
        scheduled = strategy.follows(replica.spec.optimizer)
        self._rounds.launch(round, fragment, values, weight, note={"rates": replica.rates if scheduled else None})
        self._making = round

    def take(self, batch: Batch, *, takes: bool, together: bool) -> None:
        """The gradient is made: waits while too many are on their way. One that is left out counts for nothing."""
        replica = self._local.replica
        if not together:
            if takes:
                replica.update()
            else:
                replica.advance()
            return
        if not takes:
            self._leave_out(self._making)
            self._exchange.withhold(self._making)
        self._stream.end(takes=takes)
        self._making = -1
        replica.advance()
        self._trigger.launched()
        self._rounds.wait_for(self._rounds.next - self._local.strategy.in_flight)

    def land(self, landed: Landed, fragment: Fragment, snapshot: Snapshot | None) -> None:
        with torch.no_grad():
            fragment.of(self._local.replica.vector).copy_(landed.reply)

    def drop(self) -> None:
        """Gives up a gradient that will never be whole, which servers would wait for."""
        round, self._making = self._making, -1
        if round >= 0:
            self._stream.drop()
            self._exchange.abandon(round)
            self._rounds.forget(round)
