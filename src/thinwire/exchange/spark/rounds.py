"""Rounds that Spark sums: the driver is the only owner.

A worker that launches a round says so to the driver, in a letter that has the contribution along. Where all together
would be much for the driver, the letter only says that the contribution can be read in the worker's box: when all have
said so, the driver runs a job that reads and sums them by a shuffle. The mean comes with a later visit. With a lossy
codec the contribution carries error feedback, and the mean comes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.exchange.carrier import Ends
from thinwire.exchange.notes import as_note
from thinwire.exchange.round import BY_DESIGN, KNOWN, Chunk, Lane, Round
from thinwire.exchange.rounds import OfRound
from thinwire.exchange.slices import Send
from thinwire.exchange.spark.link import EXACT, SPARK, Offer, SparkLink
from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import AMONG_WORKERS, COORDINATOR, FROM_SPARK, Launched, Message, SparkOpen, SparkSum
from thinwire.rules.compression import codec
from thinwire.rules.finite import is_finite

HEAVY = 2.0**60
"""The weight of a mean that is known already, where sums know weights alone: others are nothing beside it."""


class SparkSumming:
    """One agent's end of sums that the driver makes; see `thinwire.exchange.rounds.Summing`."""

    def __init__(self, link: SparkLink, send: Send) -> None:
        self._link, self._send = link, send
        self.polls = False

    def cut(self, fragment: Fragment, members: tuple[int, ...], lane: Lane) -> tuple[Chunk, ...]:
        return (Chunk(SPARK, 0, fragment.size, True),)

    def heeds(self, sender: int, body: OfRound, attempts: Mapping[int, int]) -> bool:
        return isinstance(body, SparkOpen | SparkSum)

    def launch(self, round: Round) -> None:
        round.weight = HEAVY if round.weight == KNOWN else round.weight
        launched = Launched(**round.stamp(0), weight=round.weight, note=round.note)
        packed = round.pack(0)
        size_bytes = round.size_bytes = round.lane.codec.size_bytes(round.fragment.size)
        if size_bytes * len(round.members) > self._link.direct_bytes and round.lane.codec.name == EXACT:
            self._link.offer(round.key, Offer(round.generation, round.weight, round.values))
            self._send(COORDINATOR, launched, None)
        else:
            self._send(COORDINATOR, launched, None if packed is None else packed.numpy().data)

    def take(self, round: Round, sender: int, body: OfRound, payload: memoryview | None) -> None:
        if not isinstance(body, SparkSum) or 0 in round.done:
            return
        packing = codec(body.packing)
        if payload is None:
            round.mean.zero_()
            round.empty.add(0)
        elif payload.nbytes != packing.size_bytes(round.fragment.size):
            raise ValueError(f"{payload.nbytes} bytes of a mean of {round.fragment.size}")
        elif packing.name == EXACT:
            round.mean = torch.frombuffer(payload, dtype=torch.float32)
        else:
            packing.decode(torch.frombuffer(payload, dtype=torch.uint8), round.fragment.size, out=round.mean)
        if round.key.partition(":")[0] not in BY_DESIGN and not is_finite(round.mean):
            raise ValueError(f"the mean of round {round.key} is not finite")
        round.dropped |= set(body.dropped)
        round.notes = {worker: as_note(note) for worker, note in body.notes.items()}
        round.done.add(0)

    def tick(self, round: Round) -> None:
        return  # nothing here depends on the time

    def missing(self, round: Round, *, launched: bool) -> set[int] | None:
        return set() if launched else None

    def forget(self, key: str) -> None:
        self._link.offer(key, None)


class ThroughSpark:
    """Carries contributions to the driver and means back, in Spark's own channels."""

    def decode(self, message: Message) -> Body:
        body: Body = (FROM_SPARK if message.sender == SPARK else AMONG_WORKERS).decode(message.header)
        return body

    def summing(self, ends: Ends) -> SparkSumming:
        assert isinstance(ends.link, SparkLink)
        return SparkSumming(ends.link, ends.send)


THROUGH_SPARK = ThroughSpark()
