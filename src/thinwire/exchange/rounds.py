"""One worker's part in all rounds of a generation. No sockets in here.

A round has a key ("train:12"), a fragment and a codec. Its states are in `thinwire.exchange.ledger`. How contributions
become a mean is left to a `Summing`: `thinwire.exchange.slices`, or `thinwire.exchange.spark.rounds`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from thinwire import logs
from thinwire.errors import ThinwireError
from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.ledger import OVER, Ledger, RoundEvent, RoundState
from thinwire.exchange.round import Chunk, Completed, Lane, Launch, Round
from thinwire.parameters import Fragment
from thinwire.protocol.clock import Clock
from thinwire.protocol.messages import Open, Part, SparkOpen, SparkSum, Sum

_log = logging.getLogger("thinwire.exchange")

MOST_OPEN = 64
"""Rounds that others may open here before this worker has launched any of them."""
MOST_EARLY = 4096

OfRound = Open | Part | Sum | SparkOpen | SparkSum
"""What is said of a round: by its members, or by Spark."""
_STRANGE = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
_REFUSED = (ThinwireError, *_STRANGE)


class Summing(Protocol):
    """How the contributions to a round become its mean."""

    @property
    def polls(self) -> bool:
        """Whether a round may end because time has passed, without a message."""

    def cut(self, fragment: Fragment, members: tuple[int, ...], lane: Lane) -> tuple[Chunk, ...]:
        """The chunks of a round, and who sums each."""

    def heeds(self, sender: int, body: OfRound, attempts: Mapping[int, int]) -> bool:
        """Whether the sender is in the generation of these workers and attempts."""

    def launch(self, round: Round) -> None:
        """Sends this worker's part to where it is summed."""

    def take(self, round: Round, sender: int, body: OfRound, payload: memoryview | None) -> None:
        """Takes in a message; raises where it does not fit."""

    def tick(self, round: Round) -> None:
        """Sums what waits no longer for workers that are late."""

    def missing(self, round: Round, *, launched: bool) -> set[int] | None:
        """The workers from which something is missing; None where nothing is waited for."""

    def forget(self, key: str) -> None:
        """A round is over, or cut anew: nothing of it is needed any more."""


class Rounds:
    """The rounds of one worker, as a machine: calls in, messages out through a `Summing`."""

    def __init__(
        self,
        me: int,
        summing: Summing,
        lane: Callable[[str, str], Lane],
        *,
        longest: int = 1 << 34,
        clock: Clock = time.monotonic,
        buffers: int = 0,
    ) -> None:
        self._me, self._summing, self._lane, self._longest, self._clock = me, summing, lane, longest, clock
        self.buffers = BufferPool(buffers)
        """What contributions may be computed into; see `Launch.pooled`."""
        self.ledger = Ledger(self.buffers)
        self._early: list[tuple[int, OfRound, memoryview | None]] = []
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.attempts: dict[int, int] = {}
        self.refused = 0
        """Messages that were not what they must be."""

    def configure(
        self, generation: int, attempts: dict[int, int], landed: Callable[[str], bool] = lambda key: False
    ) -> list[Launch]:
        """Starts a generation of these workers; returns this worker's parts that are to be launched in it.

        Rounds that `landed` elsewhere are over: what was contributed to them has arrived.
        """
        records = self.ledger.records()
        for record in reversed(records):  # of two rounds of one fragment the later sum is undone first
            if record.cut is not None:
                if not landed(record.key):
                    record.cut.take_back()
                self._summing.forget(record.key)
                record.cut = record.done = None
        for record in records:
            over = landed(record.key) and record.state is not RoundState.CLAIMED
            self.ledger.move(record.key, RoundEvent.DROP if over else RoundEvent.FORM)
        self.ledger.forget_over()
        self.generation, self.attempts = generation, dict(attempts)
        logs.note(generation=generation)
        _log.info("generation %s has formed, of workers %s", generation, sorted(attempts))
        self.members = tuple(sorted(attempts))
        held = self.ledger.records(RoundState.HELD)
        early, self._early = self._early, []
        for sender, body, payload in early:
            self.receive(sender, body, payload)
        return [record.own for record in held if record.own is not None]

    def hold(self, own: Launch) -> bool:
        """Keeps this worker's part until a generation has formed. False if it has no part to give any more."""
        if not self.ledger.allows(own.key, RoundEvent.HOLD):
            return False
        self.ledger.move(own.key, RoundEvent.HOLD).own = own
        return True

    def launch(self, own: Launch) -> bool:
        """Contributes to a round; with no values this worker only sums and listens. False if it already has."""
        record = self.ledger.find(own.key)
        if self.ledger.state(own.key) in (RoundState.LAUNCHED, RoundState.SUMMED, *OVER):
            return False
        round = record.cut if record is not None else None
        if round is None or (round.fragment, round.lane.codec.name) != (own.fragment, own.codec):
            self.refused += round is not None  # others opened it as something else than it is
            round = self._open(own.key, own.fragment, own.codec)
        record = self.ledger.move(own.key, RoundEvent.LAUNCH)
        record.own = own
        round.contribute(own, self._clock())
        self._summing.launch(round)
        self._try_complete(own.key)
        return True

    def wanted(self) -> list[tuple[str, Fragment, str]]:
        """Rounds that others have launched and this worker has not."""
        records = self.ledger.records(RoundState.OPENED, RoundState.CLAIMED, RoundState.HELD)
        return [(r.key, r.cut.fragment, r.cut.lane.codec.name) for r in records if r.cut is not None]

    @property
    def waiting(self) -> bool:
        """Whether a round is open that may end because time has passed."""
        return self._summing.polls and any(record.cut is not None for record in self.ledger.records())

    def waiting_for(self) -> dict[str, list[int]]:
        """Open rounds, and the workers each still misses something from."""
        found: dict[str, list[int]] = {}
        for record in self.ledger.records():
            if record.cut is not None and record.state is not RoundState.SUMMED:
                missing = self._summing.missing(record.cut, launched=record.state is RoundState.LAUNCHED)
                if missing is not None:
                    found[record.key] = sorted(missing)
        return found

    def receive(self, sender: int, body: OfRound, payload: memoryview | None) -> None:
        """Takes in a peer's message; what does not fit is refused and counted, never raised."""
        try:
            self._receive(sender, body, payload)
        except _REFUSED:
            self.refused += 1

    def tick(self) -> None:
        """Completes what only waits for workers that miss the quorum's grace time."""
        for record in self.ledger.records():
            if record.cut is not None:
                self._summing.tick(record.cut)
                self._try_complete(record.key)

    def summed(self) -> list[Completed]:
        """Rounds that are summed and neither landed nor dropped, in the order in which they were opened."""
        return [record.done for record in self.ledger.records(RoundState.SUMMED) if record.done is not None]

    def land(self, key: str) -> None:
        """A summed round has been taken up: nothing of it needs to be kept."""
        self._summing.forget(key)
        self.ledger.move(key, RoundEvent.LAND)

    def drop(self, key: str) -> None:
        """The joint state, which came from a peer, has a round already."""
        self._summing.forget(key)
        self.ledger.move(key, RoundEvent.DROP)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _receive(self, sender: int, body: OfRound, payload: memoryview | None) -> None:
        if body.generation > self.generation:
            if len(self._early) >= MOST_EARLY:
                raise ValueError("too many messages of a generation not heard of")
            self._early.append((sender, body, payload))
            return
        if body.generation != self.generation or not self._summing.heeds(sender, body, self.attempts):
            return  # an older generation, or a worker that was replaced: normal, and of no use
        if self.ledger.state(body.round) in OVER:
            return
        self._summing.take(self._opened(body), sender, body, payload)
        self._try_complete(body.round)

    def _opened(self, body: OfRound) -> Round:
        """The round that a message is of."""
        key, (start, stop) = body.round, body.span
        record = self.ledger.find(key)
        if record is None or record.cut is None:
            if not 0 <= start < stop <= self._longest or len(self.wanted()) >= MOST_OPEN:
                raise ValueError(f"round {key} of {start} to {stop}")
            return self._open(key, Fragment(start, stop), body.codec)
        if record.cut.fragment != (start, stop) or record.cut.lane.codec.name != body.codec:
            raise ValueError(f"round {key} is of {record.cut.fragment} in {record.cut.lane.codec.name}")
        return record.cut

    def _open(self, key: str, fragment: Fragment, codec_name: str) -> Round:
        """Cuts a round among the members of the generation."""
        lane = self._lane(key, codec_name)
        if lane.residual is not None and fragment.stop > lane.residual.numel():
            raise ValueError(f"round {key} of {fragment} goes past the model")
        chunks = self._summing.cut(fragment, self.members, lane)
        round = Round(key, fragment, lane, chunks, self._clock(), torch.empty(fragment.size))
        round.generation, round.attempt, round.members = self.generation, self.attempts.get(self._me, 0), self.members
        self.ledger.move(key, RoundEvent.OPEN).cut = round
        return round

    def _try_complete(self, key: str) -> None:
        record = self.ledger.find(key)
        if record is None or record.state is not RoundState.LAUNCHED or record.cut is None:
            return
        if len(record.cut.done) == len(record.cut.chunks):
            record.done = record.cut.completed(self._clock())
            self.ledger.move(key, RoundEvent.SUM)
