"""DeepSpark: EASGD whose period grows as the loss falls."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.rules.period import spent
from thinwire.strategies.base import Progress
from thinwire.strategies.checks import at_least
from thinwire.strategies.served import Elastic


@dataclass(frozen=True, kw_only=True)
class DeepSpark(Elastic):
    """Asynchronous EASGD with an adaptive period (Kim et al. 2016, Algorithm 1).

    Args:
        period: steps before a worker's first meeting with the joint model, τ.
        budget: training loss, summed over steps, after which the next meeting is due (L_cut); None takes the loss that
            the worker summed up in its first `period` steps, as the original does.
        pool: threads that a server updates the joint model with. They take no locks, so that of two updates of one
            tuple at the same moment a part may be lost, as in the paper (§3.4).
        pull: α, the share of the distance by which both move; None is 0.9 over the number of workers.
        servers: on how many workers the joint model lives, a share each; "spread" is on all of them, "driver" on a
            process beside the driver, which has no rows.
        tuple_size: elements of the largest tuple, the piece of the joint model that is sent and updated as one.
        log_every: updates of a tuple between two checkpoints of it, which a server lost is recovered from; "auto" is
            16, or twice the workers where that is more.
    """

    period: int = 10
    budget: float | None = None
    pool: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, period=self.period, pool=self.pool)
        at_least(self, 0, budget=self.budget)

    @property
    def exchangers(self) -> int:
        return self.pool

    def due(self, progress: Progress) -> bool:
        budget = progress.first_loss if self.budget is None else self.budget
        if budget is None:
            return progress.steps_since >= self.period
        return progress.steps_since >= 1 and spent(progress.loss_since, budget)
