"""Per-step gradient averaging: the baseline everyone knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.rules.compression import codec as codec_by_name
from thinwire.strategies.base import Measured, Nothing, Progress, Setting, Share, Strategy, Subject, Timing


@dataclass(frozen=True, kw_only=True)
class Synchronous(Strategy):
    """Every step uses the mean gradient over all workers' rows, so K workers equal one with a K-fold batch.

    Args:
        codec: how gradients are packed on the wire; lossy ones carry error feedback.
    """

    timing: ClassVar[Timing] = "barrier"
    subject: ClassVar[Subject] = "gradients"
    searches: ClassVar[bool] = True

    codec: str | None = None

    def __post_init__(self) -> None:
        if self.codec is not None:
            codec_by_name(str(self.codec))

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        return Setting(codec=self.codec)

    def open(self, x: Tensor) -> tuple[Nothing, Nothing]:
        return Nothing(), Nothing()  # the replicas never differ: each one is the joint model

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= 1

    def contribute(self, joint: Any, snapshot: Tensor) -> Tensor:
        return snapshot

    def weight(self, share: Share) -> float:
        return float(share.rows)

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, Any]:
        return mean, joint

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return reply, worker
