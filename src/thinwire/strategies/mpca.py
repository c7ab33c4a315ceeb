"""MPCA SGD: fragments rotate without pause while workers step, held together by a pull."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from thinwire.rules import mpca
from thinwire.strategies.base import Measured, Progress, Setting, Share, Strategy, Timing
from thinwire.strategies.checks import at_least, length, one_of, within

NAMES = ("pull_cycles", "lookahead_cycles", "blend_cycles")
PAPERS = 20
"""Cycles of the paper's own schedules (§7.1)."""
LEAST_KNOWN = 0.05
"""The pull before an exchange was measured."""
NEAR = 1.5
"""Times another number, up to which it is about the same."""


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
        pull: α, the pull towards the joint model at every step, once its schedule has settled (eq. 7); "auto" takes it
            from the steps that an exchange of the whole model takes, as they are measured.
        pull_peak: α right after the free cycles, decayed to `pull` over `pull_cycles` (§6.3).
        free_cycles: exchange cycles at the start with no pull at all.
        pull_cycles: cycles over which the pull decays; as any of the three lengths a share of the run, if below 1.
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
    pull: float | Literal["auto"] = 0.05
    pull_peak: float = 0.5
    free_cycles: int = 1
    pull_cycles: float = 20
    form: Literal["replica", "gradient"] = "replica"
    smoothing: float = 0.8
    lookahead: float = 0.7
    lookahead_cycles: float = 20
    blend: float = 0.9
    blend_cycles: float = 20
    weigh_steps: bool = True

    def __post_init__(self) -> None:
        one_of(self, (1, 2, 3), fragments=self.fragments)
        one_of(self, ("replica", "gradient"), form=self.form)
        if self.pull != "auto":
            within(self, 0, 1, pull=self.pull)
        within(self, 0, 1, pull_peak=self.pull_peak, smoothing=self.smoothing)
        within(self, 1e-6, 1, blend=self.blend)
        at_least(self, 0, lookahead=self.lookahead, free_cycles=self.free_cycles)
        length(self, pull_cycles=self.pull_cycles, blend_cycles=self.blend_cycles)
        length(self, lookahead_cycles=self.lookahead_cycles)

    @property
    def in_flight(self) -> int:
        return max(1, self.fragments - 1)

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        """What is left to measurements: the pull, and the cycles of the run; a small change is not worth a new cut."""
        found = Setting(fragments=self.fragments)
        if self.pull == "auto":
            period = self._period(measured)
            pull = mpca.measured_pull(period) if period is not None else LEAST_KNOWN
            found = replace(found, pull=_unless_near(pull, current.pull if current else None))
        if self.shares:
            cycles = None
            if measured.run_steps and measured.steps and measured.rounds:
                cycles = measured.rounds / self.fragments * measured.run_steps / measured.steps
            found = replace(found, cycles=_unless_near(cycles, current.cycles if current else None))
        return found

    def _period(self, measured: Measured) -> float | None:
        """Steps that an exchange of the whole model takes; None before enough rounds were measured."""
        if measured.link is None or not measured.step_s or measured.rounds < self.fragments + 2:
            return None
        sent_bytes = 8.0 * measured.size * (measured.workers - 1) / measured.workers
        return (sent_bytes / measured.link.bytes_per_s + self.fragments * measured.link.latency_s) / measured.step_s

    def explain(self, measured: Measured, setting: Setting) -> str:
        """The pull, and what it was taken from."""
        period = self._period(measured)
        if self.pull != "auto" or period is None or setting.pull is None:
            return ""
        return f"an exchange of the model takes {period:.2g} steps: pull {setting.pull:.2g}"

    @property
    def shares(self) -> tuple[str, ...]:
        """The lengths that are shares of the run."""
        return tuple(name for name, value in zip(NAMES, self._lengths, strict=True) if value < 1)

    @property
    def _lengths(self) -> tuple[float, float, float]:
        return self.pull_cycles, self.lookahead_cycles, self.blend_cycles

    def under(self, setting: Setting) -> MPCA:
        """The same with numbers in place of what is left to measurements."""
        return self._with(setting) if self.pull == "auto" or self.shares else self

    def _with(self, setting: Setting) -> MPCA:
        """The same with numbers in place of what is left to measurements; before these the paper's own."""
        pull = self.pull if self.pull != "auto" else LEAST_KNOWN if setting.pull is None else setting.pull
        lengths: dict[str, Any] = {
            name: value if value >= 1 else PAPERS if setting.cycles is None else max(1, round(value * setting.cycles))
            for name, value in zip(NAMES, self._lengths, strict=True)
        }
        return replace(self, pull=pull, **lengths)

    def unsettled(self, rounds: int) -> str:
        """What of its schedules a run of so many rounds ended before, in words; empty where they were over."""
        cycles = rounds // self.fragments
        after = {"pull_cycles": self.free_cycles}
        ends = {
            name: value + after.get(name, 0) for name, value in zip(NAMES, self._lengths, strict=True) if value >= 1
        }
        late = [f"{name} = {value - after.get(name, 0):g}" for name, value in ends.items() if value > cycles]
        if not late:
            return ""
        return (
            f"the run ended after {cycles} exchange cycles, before its schedules did: MPCA.{', '.join(late)}. Train "
            "longer, or give lengths as shares of the run: pull_cycles=0.2"
        )

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= 1

    def open(self, x: Tensor) -> tuple[MPCAJoint, MPCAWorker]:
        return MPCAJoint(x.clone(), x.new_zeros(x.shape)), MPCAWorker(x.clone())

    def pull_at(self, cycle: int) -> float:
        """α in one exchange cycle."""
        end = LEAST_KNOWN if self.pull == "auto" else self.pull
        return mpca.pull_schedule(
            cycle, peak=max(end, self.pull_peak), end=end, free_cycles=self.free_cycles, decay_cycles=self.pull_cycles
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
        ruled = self.under(setting)
        rate = mpca.blend_schedule(cycle, end=self.blend, cycles=ruled.blend_cycles)
        model = mpca.blend(joint.model, joint.model - mean, rate)
        velocity = mpca.trajectory(joint.velocity, model, joint.model, self.smoothing)
        ahead = mpca.lookahead_schedule(cycle, end=self.lookahead, cycles=ruled.lookahead_cycles)
        return mpca.extrapolate(model, velocity, ahead), MPCAJoint(model, velocity)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, MPCAWorker]:
        return x, MPCAWorker(reply)


def _unless_near(found: float | None, current: float | None) -> float | None:
    """The number in force, unless what was found is another."""
    if found is None or (current and current / NEAR <= found <= current * NEAR):
        return current
    return found
