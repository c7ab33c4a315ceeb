"""What carries the messages of rounds: the members themselves, or Spark (`thinwire.exchange.spark.rounds`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from thinwire.exchange.joint import JointState
from thinwire.exchange.round import Lane
from thinwire.exchange.rounds import Rounds, Send, Tell
from thinwire.protocol.clock import Clock
from thinwire.protocol.messages import AMONG_WORKERS, Message, Open, Part, Sum
from thinwire.transport.ports import Link


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What rounds are given of the worker that takes part in them."""

    worker: int
    joint: JointState
    link: Link
    send: Send
    lane: Callable[[str, str], Lane]
    clock: Clock
    tell_not_finite: Tell


class Carrier(Protocol):
    """How contributions of rounds reach each other."""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The messages that are for rounds."""

    def decode(self, message: Message) -> Any:
        """What a worker, or the carrier itself, says."""

    def rounds(self, ends: Ends) -> Rounds:
        """One worker's part in all rounds."""


class AmongMembers:
    """Members send each other contributions and sums."""

    kinds: tuple[Any, ...] = (Open, Part, Sum)

    def decode(self, message: Message) -> Any:
        return AMONG_WORKERS.decode(message.header)

    def rounds(self, ends: Ends) -> Rounds:
        strategy = ends.joint.strategy
        return Rounds(
            ends.worker,
            ends.send,
            ends.lane,
            quorum=strategy.quorum,
            grace_s=strategy.grace_s,
            longest=ends.joint.size + (1 << 24),  # means of buffers may be longer
            clock=ends.clock,
            tell=ends.tell_not_finite,
        )


AMONG_MEMBERS = AmongMembers()
