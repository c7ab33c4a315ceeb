"""Auto: Relay that also chooses between waiting and overlapping, and how much to compress; with a guard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from thinwire.rules import relay
from thinwire.strategies.base import Measured, Setting
from thinwire.strategies.checks import one_of
from thinwire.strategies.relay import CODECS, Relay, RelayJoint


@dataclass(frozen=True, kw_only=True)
class Auto(Relay):
    """Chooses by what the first rounds took against a step, says why in one line, and again when the link changes.

    Where the exchange is nothing beside a step, every step waits for the mean of all replicas, in float32: synchronous
    SGD. Where it fits inside half a step, it goes on beside the next one in the widest codec that fits. Where it does
    not, it is Relay. Every knob of Relay that is given is kept to.

    Args:
        guard: compare the joint model early in the run with the replicas, and with one that learnt alone until then;
            where it is worse, exchange twice as tightly, at the price of waiting, and say so.
    """

    guard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, (True, False), guard=self.guard)

    @property
    def guards(self) -> bool:  # type: ignore[override]
        return self.guard

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        """Relay's with the codec that fits, or waiting where that costs nothing; tighter by each time it hurt."""
        chosen = super().setting(measured, current)
        if current is None or not self._knows(measured):
            return chosen
        momentum = 0.0 if self.momentum == "auto" else self.momentum
        caution = current.caution + measured.hurts
        if caution:  # plain averages, whatever was asked for
            tighter = max(1, chosen.fragments >> caution)
            return replace(chosen, fragments=tighter, momentum=0.0, wait=True, caution=caution)
        ratio, latency = self._seen(measured)
        if self.fragments == "auto" and relay.worth_waiting(ratio, latency + self._rest(measured), waits=current.wait):
            codec = CODECS[32 if self.bits == "auto" else self.bits]
            return Setting(fragments=1, codec=codec, momentum=momentum, wait=True)
        return chosen

    def explain(self, measured: Measured, setting: Setting) -> str:
        """Relay's line; after the guard spoke up, that exchanges are tighter for it."""
        said = super().explain(measured, setting)
        return f"{said} (tightened {setting.caution}× by the guard)" if said and setting.caution else said

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, RelayJoint]:
        plain = self if not setting.caution else replace(self, lr=1.0)
        return super(Auto, plain).merge(joint, mean, cycle, setting)

    def _bits(self, ratio: float, latency: float) -> tuple[int, ...]:
        return relay.widths(ratio, latency=latency) if self.bits == "auto" else (self.bits,)
