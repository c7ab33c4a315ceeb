"""SparkNet: τ local steps, then the mean replaces every replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.rules import outer
from thinwire.strategies.base import Joint, Progress, Setting, Share, Strategy, Timing
from thinwire.strategies.checks import at_least


@dataclass(frozen=True, kw_only=True)
class SparkNet(Strategy):
    """Local SGD with periodic averaging (Moritz et al. 2016, Listing 3).

    Args:
        period: local steps between rounds, τ.
        period_s: seconds between rounds instead, so that a straggler holds nobody up (§4).
        warmup: steps that the first worker makes alone before the others start from its parameters (§2.1).
    """

    timing: ClassVar[Timing] = "barrier"

    period: int = 50
    period_s: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, period=self.period)
        at_least(self, 0, period_s=self.period_s, warmup=self.warmup)

    def due(self, progress: Progress) -> bool:
        if self.warmup and progress.round == 0:
            return progress.steps >= self.warmup if progress.lead else True
        if self.period_s is not None:
            return progress.steps_since >= 1 and progress.seconds_since >= self.period_s
        return progress.steps_since >= self.period

    def weight(self, share: Share) -> float:
        return float(share.lead) if self.warmup and share.round == 0 else 1.0

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Joint]:
        model = outer.sgd(joint.model, mean, 1.0)
        return model, Joint(model)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return reply, worker
