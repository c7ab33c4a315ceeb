"""What a reply does to the replica that it lands on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.exchange.signals import Landed
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker


def take_over(
    worker: Worker, landed: Landed, fragment: Fragment, snapshot: Snapshot | None, base: Tensor | None
) -> None:
    """Takes a reply over: parameters from servers, a mean gradient, or what the strategy makes of it."""
    replica = worker.replica
    if worker.served:
        with torch.no_grad():
            fragment.of(replica.vector).copy_(landed.reply)
    elif worker.search:
        worker.search.follow(landed)
    elif worker.gradients:
        worker.mean_gradient, worker.mean_is_empty = landed.reply, landed.empty
        worker.mean_absent = absent_from(landed.notes.values())
        if worker.averages == landed.round:
            return
        if landed.empty:
            worker.mean_gradient = None
            replica.advance()
        elif snapshot is None:  # the rows here are done, the others' are not: their steps are taken here too
            replica.parameters.scatter_gradients(landed.reply.to(replica.vector.device), worker.mean_absent)
            worker.mean_gradient = None
            replica.update()
    elif worker.ahead:
        began = worker.time.now()
        worker.ahead.land(fragment, landed.reply, worker.meter.steps)
        worker.meter.handled(worker.time.now() - began, fragment.size / worker.joint.size)
        if base is not None and snapshot is not None:
            worker.spares.give(base)
    elif base is not None:
        near = snapshot.near if snapshot is not None and landed.snapshot is None else None
        began = worker.time.now()
        with torch.no_grad():
            worker.state.adopt(fragment, replica.vector, base if near is None else near, landed.reply)
        worker.meter.handled(worker.time.now() - began, fragment.size / worker.joint.size)
        ours = landed.snapshot is None and near is None
        if ours and worker.joint.state:  # a stateless one may have contributed the snapshot itself
            worker.spares.give(base)


def absent_from(notes: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """The parameters, by number, of which none that contributed to a round has a gradient.

    >>> sorted(absent_from([{"absent": [1, 2]}, {"absent": [2]}, {"rows": 5}]))
    [2]
    """
    said = [frozenset(note["absent"]) for note in notes if "absent" in note]
    return frozenset.intersection(*said) if said else frozenset()
