"""Relay: one compressed fragment a step, landed with delay correction. thinwire's own, and the default."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.parameters import FlatParameters
from thinwire.rules import compression, outer, relay, staleness
from thinwire.rules.optimizer import FlatOptimizer
from thinwire.strategies.base import Measured, Nothing, Progress, Setting, Share, Strategy, Timing
from thinwire.strategies.checks import at_least, one_of, within
from thinwire.strategies.joint_optimizer import JointOptimizer
from thinwire.units import rate_text, seconds_text

PROBES = (8, 4)
"""Fragment counts of the first rounds: two sizes, so that latency and bandwidth can be told apart."""
PROBE_ROUNDS = 6
KEPT = 1.5
"""Times the fragments that would do, which are kept: cutting anew costs a round of each."""
UNKNOWN = 7.0
"""Steps that an exchange is taken for before it is measured: four bits."""
CODECS = {each.bits: name for name, each in compression.CODECS.items()}
"""By the bits of a value."""
CODEC_BITS = {name: each.bits for name, each in compression.CODECS.items()}
WIDER = {name: CODECS.get(2 * bits, "bfloat16") for bits, name in CODECS.items()}
"""Another size of the same values: twice as many bits, where there are."""


class RelayJoint(NamedTuple):
    model: Tensor
    momentum: Tensor


@dataclass(frozen=True, kw_only=True)
class Relay(Strategy):
    """Coordinated rounds that never stop the workers, with the bytes saved by compression spent on freshness.

    Args:
        bits: 1, 2, 4, 8, or "auto": from the measured exchange and step times.
        fragments: pieces in rotation, or "auto": so many that one piece's exchange fits inside one step.
        lr: outer learning rate.
        momentum: outer Nesterov momentum, or "auto".
        quorum: share of the workers that completes a round once the grace time has passed.
        grace_s: how long the others are waited for; what misses a round is sent again with the next.
        sends: "displacements", what each replica's own optimizer has made of its parameters, or "gradients", by whose
            means all take the steps of one joint optimizer, and which replicas run ahead of. "auto" sends gradients
            where the optimizer divides its steps by a magnitude that it keeps of each gradient, as Adam does.
    """

    timing: ClassVar[Timing] = "overlap"
    bits: int | Literal["auto"] = "auto"
    fragments: int | Literal["auto"] = "auto"
    lr: float = 1.0
    momentum: float | Literal["auto"] = "auto"
    quorum: float = 0.5
    grace_s: float = 2.0
    sends: Literal["auto", "displacements", "gradients"] = "auto"

    def __post_init__(self) -> None:
        one_of(self, ("auto", 1, 2, 4, 8), bits=self.bits)
        one_of(self, ("auto", "displacements", "gradients"), sends=self.sends)
        if self.fragments != "auto":
            at_least(self, 1, fragments=self.fragments)
        if self.momentum != "auto":
            within(self, 0, 1, momentum=self.momentum)
        at_least(self, 0, lr=self.lr, grace_s=self.grace_s)
        within(self, 0, 1, quorum=self.quorum)

    @property
    def ends_in_mean(self) -> bool:  # type: ignore[override]
        return self.joint_optimizer is None

    def with_optimizer(self, factory: Callable[[Any], Any]) -> Strategy:
        return _knowing(self, factory=factory)

    def laid_out(self, parameters: FlatParameters, make: Callable[[Any], Any]) -> Strategy:
        """With the joint optimizer, where gradients are to be sent."""
        factory: Callable[[Any], Any] | None = vars(self).get("factory")
        if factory is None or self.sends == "displacements":
            return self
        rule = FlatOptimizer(factory, make(factory), parameters)
        return _knowing(self, joint_optimizer=JointOptimizer(rule)) if self.steps_jointly(rule) else self

    def steps_jointly(self, rule: FlatOptimizer) -> bool:
        """Whether gradients are sent where this is the run's optimizer.

        Raises:
            ConfigError: They are to be, and the optimizer cannot step in pieces.
        """
        if self.sends == "displacements" or (self.sends == "auto" and not rule.magnitudes):
            return False
        why_not = rule.why_not_in_pieces
        if why_not and self.sends == "gradients":
            raise ConfigError(f"{type(self).__name__}(sends='gradients') is not possible: {why_not}")
        return not why_not

    def setting(self, measured: Measured, current: Setting | None) -> Setting:
        """Probes two sizes first, then follows the measurements; a small change is not worth cutting anew."""
        if current is None or not self._knows(measured):
            return self._cut(measured, current, ratio=UNKNOWN, count=PROBES[0] if current is None else PROBES[1])
        ratio, latency = self._seen(measured)
        return self._cut(measured, current, ratio=ratio, latency=latency)

    def probe(self, setting: Setting) -> Setting:
        """Pieces of twice the size, by cutting or by the codec, as far as either is free."""
        if self.fragments == "auto" and setting.fragments > 1:
            return replace(setting, fragments=setting.fragments // 2)
        if self.bits == "auto" and setting.codec in WIDER:
            return replace(setting, codec=WIDER[setting.codec])
        return setting

    def explain(self, measured: Measured, setting: Setting) -> str:
        """What limits rounds, and what is sent for it, in two sentences."""
        if not self._knows(measured) or measured.link is None or measured.step_s is None:
            return ""
        what = "gradients" if self.joint_optimizer is not None else "displacements"
        return f"{_limit(measured, setting, self._seen(measured)[0])} {_sending(setting, what)}"

    def _knows(self, measured: Measured) -> bool:
        return measured.link is not None and bool(measured.step_s) and measured.rounds >= PROBE_ROUNDS

    def _seen(self, measured: Measured) -> tuple[float, float]:
        """The exchange ratio, and the latency of a round in steps."""
        assert measured.link is not None
        assert measured.step_s
        sent_bytes = 8.0 * measured.size * (measured.workers - 1) / measured.workers
        ratio = relay.exchange_ratio(sent_bytes / measured.link.bytes_per_s, measured.step_s)
        return ratio, measured.link.latency_s / measured.step_s

    def _rest(self, measured: Measured) -> float:
        """Steps that a round takes beside the link: they count for how the model is cut, not for how it is packed."""
        return measured.rest_s / measured.step_s if measured.step_s else 0.0

    def _bits(self, ratio: float, latency: float) -> tuple[int, ...]:
        """Those to choose from."""
        return relay.PACKED if self.bits == "auto" else (self.bits,)

    def _cut(
        self, measured: Measured, current: Setting | None, *, ratio: float, latency: float = 0.0, count: int = 0
    ) -> Setting:
        most = max(1, min(64, measured.size // 4096))
        if self.fragments != "auto":
            count = self.fragments
        least, limit = (count, count) if count else (1, most)
        choice = tuple(b for b in self._bits(ratio, latency) if b > 1 or self.joint_optimizer is None or self.bits == 1)
        bits = relay.choose_bits(ratio, choice, workers=measured.workers, least=least, most=limit)
        if not count:
            late = latency + self._rest(measured)  # one piece and the rest of its round are to fit into a step
            wire = relay.num_fragments(ratio, bits, latency=late, most=most)
            round_s = (measured.step_s or 1.0) * max(1.0, latency)
            count = max(wire, relay.fragments_in_passing(measured.handling_s or 0.0, round_s, most=most))
            if current and count <= current.fragments <= count * KEPT and CODECS[bits] == current.codec:
                count = current.fragments
        waits = count * max(1.0, latency + self._rest(measured)) if self._knows(measured) else 0.0
        decay = relay.choose_momentum(waits, measured.workers) if self.momentum == "auto" else self.momentum
        return Setting(fragments=count, codec=CODECS[bits], momentum=decay)

    def due(self, progress: Progress) -> bool:
        return progress.steps_since >= 1

    def open(self, x: Tensor) -> tuple[Any, Nothing]:
        if self.joint_optimizer is not None:
            return self.joint_optimizer.open(x), Nothing()
        return RelayJoint(x.clone(), x.new_zeros(x.shape)), Nothing()

    def contribute(self, joint: Any, snapshot: Tensor) -> Tensor:
        return snapshot if self.joint_optimizer is not None else super().contribute(joint, snapshot)

    def weight(self, share: Share) -> float:
        return 1.0 if self.joint_optimizer is not None else float(share.rows)

    def merge(self, joint: Any, mean: Tensor, cycle: int, setting: Setting) -> tuple[Tensor, RelayJoint]:
        decay = setting.momentum if setting.momentum is not None else 0.0
        model, momentum = outer.nesterov(joint.model, joint.momentum, mean, lr=self.lr, decay=decay)
        return model, RelayJoint(model, momentum)

    def adopt(self, worker: Any, x: Tensor, snapshot: Tensor, reply: Tensor) -> tuple[Tensor, Any]:
        return staleness.land(x, snapshot, reply), worker


def _steps(ratio: float) -> str:
    """So many steps, as people say it.

    >>> _steps(0.52), _steps(1.04), _steps(31.2), _steps(2.8e6)
    ('0.5 steps', '1 step', '31 steps', 'more than 1,000 steps')
    """
    if ratio > 1000:
        return "more than 1,000 steps"
    number = f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}".removesuffix(".0")
    return f"{number} step{'' if number == '1' else 's'}"


def _knowing(strategy: Relay, **found: Any) -> Relay:
    """The same strategy with what was found out since it was made."""
    same = copy.copy(strategy)
    for name, value in found.items():
        object.__setattr__(same, name, value)
    return same


def _limit(measured: Measured, setting: Setting, ratio: float) -> str:
    """How long an exchange takes on this link, and what else makes rounds long."""
    assert measured.link is not None
    assert measured.step_s is not None
    bits = CODEC_BITS[setting.codec or "float32"]
    wire_s = ratio * measured.step_s * (bits + relay.SCALE_BITS) / 32 / setting.fragments
    rest_s = measured.link.latency_s + measured.rest_s
    late = rest_s >= 0.05 * measured.step_s
    if late and measured.rest_s > max(wire_s, measured.link.latency_s):
        besides = f"a round takes {seconds_text(rest_s)} beside its bytes"
        return f"Processors, not the wire, are the limit: {besides}."
    besides = f", and a round {seconds_text(rest_s)} beside its bytes" if late else ""
    if ratio < 1e-3:
        return f"The link is no limit{besides}."
    carries = f"{rate_text(measured.link.bytes_per_s)}"
    if ratio < 0.95:
        return f"The link is fast ({carries}): one exchange of the whole model takes less than a step{besides}."
    taken = f"{_steps(ratio)} of {seconds_text(measured.step_s)}"
    return f"The link carries {carries}: one exchange of the whole model takes {taken}{besides}."


def _sending(setting: Setting, what: str) -> str:
    """What is sent in a round, in how many bits and pieces."""
    bits = CODEC_BITS[setting.codec or "float32"]
    pieces = f", {setting.fragments} fragments in turn," if setting.fragments > 1 else ""
    when = "while steps wait" if setting.wait else "in the background"
    return f"Sending {what} in {bits} bit{'s' * (bits > 1)} a value{pieces} {when}."
