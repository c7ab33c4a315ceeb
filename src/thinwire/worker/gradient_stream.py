"""A gradient on its way to table servers, tuple by tuple, as backward produces it (SINGA §5.3).

The last layers' gradients are there first. They travel, and their new parameters come back, while those of the first
layers are still being computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.strategies import Share

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker


class Stream:
    """Watches a replica's gradients; between `begin` and `end` each tuple that is whole is told of."""

    def __init__(self, replica: Any, tuples: Sequence[Fragment], *, together: bool) -> None:
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
            tensor.register_post_accumulate_grad_hook(functools.partial(self._made, index))

    def begin(self, feed: Callable[[list[int], frozenset[int]], None]) -> None:
        """From here on `feed` hears of tuples whose values no longer change."""
        self.values = torch.zeros(self._replica.parameters.size)
        self._feed, self._missing, self._seen = feed, list(self._parts), set()

    def end(self, *, takes: bool) -> None:
        """Backward is over: what it did not touch has no gradient; with a limit to the norm, all is sent only now."""
        if takes and self._waits:
            self._replica.clip()
            self._replica.parameters.gather_gradients(self.values)
        for index, tensor in enumerate(self._replica.parameters.tensors):
            if index not in self._seen and tensor.grad is not None:  # made, but not by autograd
                offset = self._replica.parameters.offsets[index]
                self.values[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor.grad.to_dense())
        rest = [key for key, missing in enumerate(self._missing) if missing or not self._parts[key]]
        if self._feed is not None and rest:
            self._feed(rest, frozenset(self._replica.parameters.absent()))
        self._feed = None

    def drop(self) -> None:
        """Backward has broken off: nothing more is told of."""
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


class Served:
    """Steps that a server's optimizer takes: this worker sends its gradients, and adopts the parameters it is sent."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stream = Stream(worker.replica, worker.exchange.tuples, together=worker.plan.group_size > 1)
        self._making = -1
        """The round whose gradient is being made; below 0 for none."""

    def begin(self, rows: float) -> None:
        """A gradient over so many rows, or rows of such a weight, is about to be made; it goes out as it is."""
        worker = self._worker
        round, fragment = worker.exchange.claim()
        self._stream.begin(functools.partial(worker.exchange.feed, round))
        values = Snapshot(self._stream.values, self._stream.values)
        weight = worker.strategy.weight(Share(round, 1, rows, worker.lead))
        scheduled = worker.strategy.follows(worker.replica.spec.optimizer)
        worker.send_off(round, fragment, values, weight, rates=worker.replica.rates if scheduled else None)
        self._making = round

    def end(self, *, takes: bool) -> None:
        """It is made: waits while too many are on their way. The rest of one that is not taken counts for nothing."""
        worker = self._worker
        if not takes:
            worker.nonfinite.without(self._making)
            worker.exchange.withhold(self._making)
        self._stream.end(takes=takes)
        self._making = -1
        worker.replica.advance()
        worker.pace.launched()
        worker.await_round(worker.exchange.next_round - worker.strategy.in_flight)

    def abandon(self) -> int | None:
        """Gives up a gradient that will never be whole, which servers would wait for; returns its round."""
        round, self._making = self._making, -1
        if round < 0:
            return None
        self._stream.drop()
        self._worker.exchange.abandon(round)
        return round


def average_gradient(worker: Worker, rows: float, *, takes: bool) -> None:
    """Takes the step of the workers' mean gradient, to which one that is not finite gives nothing.

    A parameter takes a step where any worker has a gradient of it; a worker that has none counts as zero. No step is
    taken where nobody gives anything, nor where a peer's state, this step done, comes instead.
    """
    round, fragment = worker.exchange.claim()
    replica = worker.replica
    if takes:
        gradient = torch.zeros_like(replica.vector)  # the padding between parameters counts in every block's scale
        replica.parameters.gather_gradients(gradient)
        share = Share(round, 1, rows, worker.lead)
        weight, absent = worker.strategy.weight(share), replica.parameters.absent()
        worker.send_off(round, fragment, Snapshot(gradient, gradient.cpu()), weight, absent=absent)
    else:
        worker.send_off(round, fragment, None, 0.0)
    worker.averages = round
    try:
        worker.await_round(round)
    finally:
        worker.averages = -1
    if worker.mean_gradient is None:
        return
    if worker.mean_is_empty:
        replica.advance()
    else:
        replica.parameters.scatter_gradients(worker.mean_gradient.to(replica.vector.device), worker.mean_absent)
        replica.update()
    worker.mean_gradient = None
