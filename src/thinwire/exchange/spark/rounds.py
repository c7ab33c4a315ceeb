"""Rounds that Spark sums: the same to a mesh as `thinwire.exchange.rounds.Rounds`, with the driver as the only owner.

A worker that launches a round says so to the driver, in a letter that has the contribution along. Where all together
would be much for the driver, the letter only says that the contribution can be read in the worker's box: when all have
said so, the driver runs a job that reads and sums them by a shuffle. The mean comes with a later visit. With a lossy
codec the contribution carries error feedback, and the mean comes in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire.exchange.carrier import Ends
from thinwire.exchange.notes import is_note
from thinwire.exchange.round import BY_DESIGN, KNOWN, Chunk, Lane, Launch, Round
from thinwire.exchange.rounds import MOST_EARLY, Rounds, Send
from thinwire.exchange.spark.link import EXACT, SPARK, Offer, SparkLink
from thinwire.parameters import Fragment
from thinwire.protocol.clock import Clock
from thinwire.protocol.messages import AMONG_WORKERS, COORDINATOR, FROM_SPARK, Launched, Message, SparkOpen, SparkSum
from thinwire.rules.compression import codec
from thinwire.rules.finite import is_finite

HEAVY = 2.0**60
"""The weight of a mean that is known already, where sums know weights alone: others are nothing beside it."""


class SparkRounds(Rounds):
    """One agent's part in all rounds of a generation."""

    def __init__(
        self, me: int, link: SparkLink, send: Send, lane: Callable[[str, str], Lane], *, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(me, send, lane, clock=clock)
        self._link = link

    def configure(
        self, generation: int, attempts: dict[int, int], landed: Callable[[str], bool] = lambda key: False
    ) -> list[Launch]:
        for key in self._open:
            self._link.offer(key, None)
        return super().configure(generation, attempts, landed)

    def waiting_for(self) -> dict[str, list[int]]:
        return {key: [] for key, entry in self._open.items() if entry.launched and not entry.complete}

    @property
    def waiting(self) -> bool:
        return False  # nothing here depends on the time

    def settle(self, key: str) -> None:
        self._link.offer(key, None)
        super().settle(key)

    def _cut(self, fragment: Fragment, lane: Lane) -> tuple[Chunk, ...]:
        return (Chunk(SPARK, 0, fragment.size, True),)

    def _scatter(self, entry: Round) -> None:
        entry.weight = HEAVY if entry.weight == KNOWN else entry.weight
        launched = Launched(**self._stamp(entry, 0), weight=entry.weight, note=entry.note)
        packed = entry.pack(0)
        size_bytes = entry.size_bytes = entry.lane.codec.size_bytes(entry.fragment.size)
        if size_bytes * len(self.members) > self._link.direct_bytes and entry.lane.codec.name == EXACT:
            self._link.offer(entry.key, Offer(self.generation, entry.weight, entry.values))
            self._send(COORDINATOR, launched, None)
        else:
            self._send(COORDINATOR, launched, None if packed is None else packed.numpy().data)

    def _receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        assert isinstance(body, SparkOpen | SparkSum)
        key = body.round
        if body.generation > self.generation and len(self._early) < MOST_EARLY:
            self._early.append((sender, body, payload))  # its generation's own beginning is still on the way
        if body.generation != self.generation or key in self._settled:
            return
        entry = self._open.get(key) or self._add(key, Fragment(*body.span), body.codec)
        if not isinstance(body, SparkSum) or not entry.launched or entry.complete:
            return
        packing = codec(body.packing)
        if payload is None:
            entry.mean.zero_()
            entry.empty.add(0)
        elif payload.nbytes != packing.size_bytes(entry.fragment.size):
            raise ValueError(f"{payload.nbytes} bytes of a mean of {entry.fragment.size}")
        elif packing.name == EXACT:
            entry.mean = torch.frombuffer(payload, dtype=torch.float32)
        else:
            packing.decode(torch.frombuffer(payload, dtype=torch.uint8), entry.fragment.size, out=entry.mean)
        if key.partition(":")[0] not in BY_DESIGN and not is_finite(entry.mean):
            raise ValueError(f"the mean of round {key} is not finite")
        entry.dropped |= set(body.dropped)
        if not all(map(is_note, body.notes.values())):
            raise ValueError("a note is a table of what workers say with rounds")
        entry.notes = body.notes
        entry.done.add(0)
        self._try_complete(entry)


class ThroughSpark:
    """Carries contributions to the driver and means back, in Spark's own channels."""

    kinds: tuple[Any, ...] = (SparkOpen, SparkSum)

    def decode(self, message: Message) -> Any:
        return (FROM_SPARK if message.sender == SPARK else AMONG_WORKERS).decode(message.header)

    def rounds(self, ends: Ends) -> Rounds:
        assert isinstance(ends.link, SparkLink)
        return SparkRounds(ends.worker, ends.link, ends.send, ends.lane)


THROUGH_SPARK = ThroughSpark()
