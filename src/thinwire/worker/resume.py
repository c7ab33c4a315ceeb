"""What a checkpoint holds of a worker, and how a worker goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thinwire.worker.worker import Worker


def worker_tree(worker: Worker) -> dict[str, Any]:
    """Everything of a worker that it needs to go on bit for bit."""
    return {
        "replica": worker.replica.tree(),
        "schedule": worker.replica.schedule(),
        "ahead": worker.ahead.tree() if worker.ahead else None,
        "worker": [v.detach().cpu().clone() if isinstance(v, Tensor) else v for v in worker.state.whole()],
        "meter": worker.meter.tree(),
        "residuals": worker.exchange.residuals(),
        "shares": worker.shares.tree(),
        "pace": worker.pace.tree(),
        "totals": {str(k): v for k, v in worker.totals.items()},
        "publisher": worker.publisher.tree(),
    }


def newcomers(own: dict[str, Any]) -> dict[str, Any]:
    """What of a worker's own part those need who have none: its buffers, and where its learning rate is."""
    replica = own["replica"]
    return {"buffers": replica["buffers"], "counts": replica["counts"], "schedule": own["schedule"]}


def resume(worker: Worker, joint: dict[str, Any], own: dict[str, Any] | None) -> None:
    """Goes on from a checkpoint; without a part of its own a worker starts from the joint model."""
    worker.joint.load(joint["joint"])
    worker.landed = worker.adopted = worker.joint.landed
    if own is None:
        _start_from(worker, joint)
        return
    worker.replica.load(own["replica"])
    device = worker.replica.vector.device
    fresh = [v.to(device) if isinstance(v, Tensor) else v for v in own["worker"]]
    worker.state.put(type(worker.state.whole())(*fresh))
    worker.meter.load(own["meter"])
    if worker.ahead and own.get("ahead"):
        worker.ahead.load(own["ahead"])
    worker.exchange.restore_residuals(own["residuals"])
    worker.shares.load(own["shares"])
    if "pace" in own:
        worker.pace.load(own["pace"])
    worker.loaded = True
    worker.totals = {int(k): int(v) for k, v in own["totals"].items()}
    worker.publisher.load(own["publisher"])


def _start_from(worker: Worker, joint: dict[str, Any]) -> None:
    if worker.strategy.replicated:
        worker.replica.load_shared(joint["replica"])
    else:
        assert worker.joint.model is not None
        with torch.no_grad():
            worker.replica.vector.copy_(worker.joint.model)
        worker.open_state()
        if "schedule" in joint:  # older checkpoints lack it
            worker.replica.buffers.load(joint["buffers"], joint["counts"])
            worker.replica.load_schedule(joint["schedule"])
    worker.publisher.load(joint["publisher"])
