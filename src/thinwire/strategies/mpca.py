"""MPCA SGD: fragments rotate without pause while workers step, held together by a pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from thinwire.rules import mpca
from thinwire.strategies.base import Measured, Progress, Setting, Share, Strategy, Timing
from thinwire.strategies.checks import at_least, one_of, within


class MPCAJoint(NamedTuple):
    model: Tensor
    velocity: Tensor


class MPCAWorker(NamedTuple):
    target: Tensor
    """The extrapolated joint model x̃* as last received."""


@dataclass(frozen=True, kw_only=True)
class MPCA(Strategy):
    """Multi-phase coordinated asynchronous SGD; the defaults are the paper's own.

    Args:
        fragments: phases, 1 to 3: the model's shards in rotation (§4.2).
        pull: α, the pull towards the joint model at every step, once its schedule has settled (eq. 7).
        pull_peak: α right after the free cycles, decayed to `pull` over `pull_cycles` (§6.3).
        free_cycles: exchange cycles at the start with no pull at all.
        pull_cycles: cycles over which the pull decays.
        form: "replica" shifts the replica before each gradient (eq. 7), "gradient" adds the penalty's (eq. 6).
        smoothing: δ of the joint model's trajectory (eq. 4).
        lookahead: γ, how many cycles ahead the joint model is extrapolated (eq. 5).
        lookahead_cycles: cycles over which γ ramps up from 0.
        blend: β, the degree to which the mean replaces the joint model, ramped down from 1 (eq. 8).
        blend_cycles: cycles of that ramp.
        weigh_steps: weight contributions by the steps behind them, so that stragglers count less (eq. 9).
    """

    timing: ClassVar[Timing] = "overlap"
    settles: ClassVar[bool] = False

    fragments: int = 3
    pull: float = 0.05
    pull_peak: float = 0.5
    free_cycles: int = 1
    pull_cycles: int = 20
    form: Literal["replica", "gradient"] = "replica"
    smoothing: float = 0.8
    lookahead: float = 0.7
    lookahead_cycles: int = 20
    blend: float = 0.9
    blend_cycles: int = 20
    weigh_steps: bool = True

    def __post_init__(self) -> None:
        one_of(self, (1, 2, 3), fragments=self.fragments)
        one_of(self, ("replica", "gradient"), form=self.form)
        within(self, 0, 1, pull=self.pull, pull_peak=self.pull_peak, smoothing=self.smoothing)
        within(self, 1e-6, 1, blend=self.blend)
        at_least(self, 0, lookahead=self.lookahead, free_cycles=self.free_cycles)
        at_least(self, 1, pull_cycles=self.pull_cycles, blend_cycles=self.blend_cycles)
        at_least(self, 1, lookahead_cycles=self.lookahead_cycles)

    @property
    def in_flight(self) -> int:
        return max(1, self.fragments - 1)

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        return Setting(fragments=self.fragments)

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= 1

    def open(self, x: Tensor) -> tuple[MPCAJoint, MPCAWorker]:
        return MPCAJoint(x.clone(), x.new_zeros(x.shape)), MPCAWorker(x.clone())

    def pull_at(self, cycle: int) -> float:
        """α in one exchange cycle."""
        return mpca.pull_schedule(
            cycle,
            peak=max(self.pull, self.pull_peak),
            end=self.pull,
            free_cycles=self.free_cycles,
            decay_cycles=self.pull_cycles,
        )

    def before_step(self, worker: Any, x: Tensor, cycle: int) -> None:
        pull = self.pull_at(cycle) if self.form == "replica" else 0.0
        if pull > 0.0:
            mpca.pull_replica(x, worker.target, pull, out=x)

    def gradient_term(self, worker: Any, x: Tensor, cycle: int) -> Tensor | None:
        pull = self.pull_at(cycle) if self.form == "gradient" else 0.0
        return mpca.penalty_gradient(x, worker.target, pull) if pull > 0.0 else None

    def weight(self, share: Share) -> float:
        return float(share.steps) if self.weigh_steps else 1.0

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, MPCAJoint]:
        rate = mpca.blend_schedule(cycle, end=self.blend, cycles=self.blend_cycles)
        model = mpca.blend(joint.model, joint.model - mean, rate)
        velocity = mpca.trajectory(joint.velocity, model, joint.model, self.smoothing)
        ahead = mpca.lookahead_schedule(cycle, end=self.lookahead, cycles=self.lookahead_cycles)
        return mpca.extrapolate(model, velocity, ahead), MPCAJoint(model, velocity)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, MPCAWorker]:
        return x, MPCAWorker(reply)
