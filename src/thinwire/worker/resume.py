"""What a checkpoint holds of a worker, and how a worker goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.checkpoint.finite import why_not_finite
from thinwire.errors import CheckpointError
from thinwire.replicas.flaws import forget_not_finite

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
    """Goes on from a checkpoint; without a part of its own a worker starts from the joint model.

    Raises:
        CheckpointError: It holds numbers that are not finite.
    """
    _refuse_not_finite(joint, own)
    worker.joint.load(joint["joint"])
    _load(worker, joint, own)
    values = worker.replica.buffers.count_not_finite() if worker.replica.buffers.size else 0
    if values:
        raise _not_finite(f"{values} values of its buffers are not finite")
    if values := forget_not_finite(worker.replica.optimizer):
        worker.nonfinite.tell("optimizer state", values, step=worker.meter.steps)


def _load(worker: Worker, joint: dict[str, Any], own: dict[str, Any] | None) -> None:
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


def _refuse_not_finite(joint: dict[str, Any], own: dict[str, Any] | None) -> None:
    for tree in (joint, own or {}):
        if why := why_not_finite(tree):
            raise _not_finite(why)


def _not_finite(why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint to go on from holds numbers that are not finite: {why}. thinwire writes no such one: it "
        "was changed or damaged. Remove its folder from checkpoints/, so that the run goes on from the one before it"
    )
