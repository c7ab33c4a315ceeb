"""What a checkpoint holds of a worker, and how a worker goes on from it."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from thinwire.exchange.ports import StatePort
from thinwire.worker.generation import Generation
from thinwire.worker.local_model import LocalModel, Origin
from thinwire.worker.open_rounds import OpenRounds
from thinwire.worker.publisher import Publisher
from thinwire.worker.round_trigger import RoundTrigger


@final
class WorkerCheckpoint:
    """Everything of a worker that it needs to go on bit for bit."""

    def __init__(
        self,
        local: LocalModel,
        generation: Generation,
        *,
        rounds: OpenRounds,
        trigger: RoundTrigger,
        exchange: StatePort,
    ) -> None:
        self._local, self._generation, self._rounds, self._trigger = local, generation, rounds, trigger
        self._exchange = exchange

    def tree(self, publisher: Publisher) -> dict[str, Any]:
        """This worker's part of a checkpoint."""
        local = self._local
        return {
            "replica": local.replica.tree(),
            "schedule": local.replica.schedule(),
            "ahead": local.ahead.tree() if local.ahead else None,
            "worker": [v.detach().cpu().clone() if isinstance(v, Tensor) else v for v in local.state.whole()],
            "meter": local.meter.tree(),
            "residuals": self._exchange.residuals(),
            "shares": local.shares.tree(),
            "pace": self._trigger.tree(),
            "totals": {str(worker): rows for worker, rows in self._generation.rows.items()},
            "publisher": publisher.tree(),
        }

    def load(self, publisher: Publisher, joint: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint; without a part of its own a worker starts from the joint model."""
        local = self._local
        local.joint.load(joint["joint"])
        self._rounds.landed = self._rounds.adopted = local.joint.landed
        if own is None:
            self._start_from(publisher, joint)
            return
        local.replica.load(own["replica"])
        device = local.replica.vector.device
        fresh = [v.to(device) if isinstance(v, Tensor) else v for v in own["worker"]]
        local.state.put(type(local.state.whole())(*fresh))
        local.meter.load(own["meter"])
        if local.ahead and own.get("ahead"):
            local.ahead.load(own["ahead"])
        self._exchange.restore_residuals(own["residuals"])
        local.shares.load(own["shares"])
        if "pace" in own:
            self._trigger.load(**own["pace"])
        local.origin = Origin.CHECKPOINT
        self._generation.rows = {int(worker): int(rows) for worker, rows in own["totals"].items()}
        publisher.load(own["publisher"])

    def _start_from(self, publisher: Publisher, joint: dict[str, Any]) -> None:
        local, replica = self._local, self._local.replica
        if local.strategy.replicated:
            replica.load_shared(joint["replica"])
        else:
            local.copy_joint()
            local.open()
            if "schedule" in joint:  # older checkpoints lack it
                replica.buffers.load(joint["buffers"], joint["counts"])
                replica.load_schedule(joint["schedule"])
        publisher.load(joint["publisher"])
