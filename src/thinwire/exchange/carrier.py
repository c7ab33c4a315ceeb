"""What carries the messages of rounds: the members themselves, or Spark (`thinwire.exchange.spark.rounds`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.exchange.rounds import Summing
from thinwire.exchange.slices import Send, SliceSumming, TellNotFinite
from thinwire.protocol.clock import Clock
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import AMONG_WORKERS, Message
from thinwire.strategies import Strategy
from thinwire.transport.ports import Link


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a carrier is given of the worker whose rounds it carries."""

    worker: int
    strategy: Strategy
    link: Link
    send: Send
    clock: Clock
    tell_not_finite: TellNotFinite


class Carrier(Protocol):
    """How contributions of rounds reach each other."""

    def decode(self, message: Message) -> Body:
        """What a worker, or the carrier itself, says."""

    def summing(self, ends: Ends) -> Summing:
        """One worker's end of the sums."""


class AmongMembers:
    """Members send each other contributions and sums."""

    def decode(self, message: Message) -> Body:
        body: Body = AMONG_WORKERS.decode(message.header)
        return body

    def summing(self, ends: Ends) -> SliceSumming:
        return SliceSumming(
            ends.worker,
            ends.send,
            quorum=ends.strategy.quorum,
            grace_s=ends.strategy.grace_s,
            clock=ends.clock,
            tell=ends.tell_not_finite,
        )


AMONG_MEMBERS = AmongMembers()
