"""EASGD: every worker meets the joint model alone, and both move towards each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.rules import elastic
from thinwire.strategies.base import Joint, Nothing, Progress
from thinwire.strategies.checks import at_least, within
from thinwire.strategies.served import Elastic


class Moved(NamedTuple):
    """Where a replica was before its last step."""

    before: Tensor


@dataclass(frozen=True, kw_only=True)
class EASGD(Elastic):
    """Elastic averaging SGD, asynchronous (Zhang et al. 2015); with momentum it is EAMSGD.

    Args:
        period: steps between a worker's meetings with the joint model, τ; each worker counts its own.
        pull: α, the share of the distance by which both move; None is 0.9 over the number of workers.
        momentum: δ of EAMSGD's look-ahead, on top of the optimizer, which is best plain SGD then; 0 is EASGD.
        servers: on how many workers the joint model lives, a share each; "spread" is on all of them, "driver" on a
            process beside the driver, which has no rows.
        tuple_size: elements of the largest tuple, the piece of the joint model that is sent and updated as one.
        log_every: updates of a tuple between two checkpoints of it, which a server lost is recovered from; "auto" is
            16, or twice the workers where that is more.
    """

    period: int = 10
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, period=self.period)
        within(self, 0, 1, momentum=self.momentum)

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= self.period

    def open(self, x: Tensor) -> tuple[Joint, Any]:
        return Joint(x.clone()), Moved(x.clone()) if self.momentum else Nothing()

    def before_step(self, worker: Any, x: Tensor, cycle: int) -> None:
        if self.momentum:
            ahead = elastic.look_ahead(x, worker.before, self.momentum)
            worker.before.copy_(x)
            x.copy_(ahead)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return x - reply, Moved(worker.before - reply) if self.momentum else worker
