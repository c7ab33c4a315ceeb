"""DiLoCo: many local steps, then an outer Nesterov step on the mean displacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.rules import outer, staleness
from thinwire.strategies.base import Measured, Progress, Setting, Strategy, Timing
from thinwire.strategies.checks import at_least, one_of, within


class DiLoCoJoint(NamedTuple):
    model: Tensor
    momentum: Tensor


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy):
    """Distributed low-communication training (Douillard et al. 2023); with `overlap` it is Streaming DiLoCo (2025).

    Args:
        period: local steps between two rounds of the same parameters, H.
        lr: outer learning rate.
        momentum: outer Nesterov momentum.
        fragments: pieces with rounds of their own, evenly spaced within the period.
        overlap: keep stepping while a round is in flight, and mix its reply into the replica when it lands.
        keep: with overlap, the share of the replica that is kept when a reply lands.
    """

    period: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: bool = False
    keep: float = 0.5

    def __post_init__(self) -> None:
        at_least(self, 1, period=self.period, fragments=self.fragments)
        at_least(self, 0, lr=self.lr)
        within(self, 0, 1, momentum=self.momentum, keep=self.keep)
        one_of(self, (True, False), overlap=self.overlap)
        at_least(self, self.fragments, period=self.period)

    @property
    def timing(self) -> Timing:  # type: ignore[override]
        return "overlap" if self.overlap else "barrier"

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        return Setting(fragments=self.fragments)

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= max(1, self.period // self.fragments)

    def open(self, x: Tensor) -> tuple[DiLoCoJoint, Any]:
        return DiLoCoJoint(x.clone(), x.new_zeros(x.shape)), super().open(x[:0])[1]

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, DiLoCoJoint]:
        model, momentum = outer.nesterov(joint.model, joint.momentum, mean, lr=self.lr, decay=self.momentum)
        return model, DiLoCoJoint(model, momentum)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return (staleness.mix(x, reply, self.keep) if self.overlap else reply), worker
