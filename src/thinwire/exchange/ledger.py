"""The rounds at one worker as state machines, in one collection.

A worker keeps a round from the moment that its stepping thread claims it, or that another worker opens it, until its
mean has landed. A new generation cuts the round anew among other members, and the round itself goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, unique

from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.round import Completed, Launch, Round
from thinwire.protocol.transitions import Row, Transitions

MOST_OVER = 128
"""Rounds that are over whose late messages are still known for what they are."""


@unique
class RoundState(Enum):
    """How far a round has come at one worker."""

    ABSENT = "Nothing of the round is here."
    CLAIMED = "The stepping thread has taken the round's number; its snapshot is on the way."
    OPENED = "Other workers have launched the round; this worker has neither claimed nor launched it."
    HELD = "This worker's part is here and waits for a generation to form."
    LAUNCHED = "This worker's part is launched: a contribution, or nothing."
    SUMMED = "All sums are here. The mean waits for earlier rounds, or for the joint state."
    LANDED = "The mean is in the joint state, or the stepping thread was told of it. Later messages are passed over."
    DROPPED = "The joint state had the round before its mean came. Later messages are passed over."


@unique
class RoundEvent(Enum):
    """What moves a round on."""

    CLAIM = "the stepping thread takes its number"
    OPEN = "another worker launches it, or this worker is about to"
    HOLD = "the stepping thread launches it while a generation forms"
    LAUNCH = "this worker launches its part: the stepping thread's, one that it held, or nothing"
    SUM = "the last sum comes in"
    LAND = "the joint state takes in the mean, or the stepping thread is told of it"
    DROP = "the joint state has the round: a peer's, or the one that a generation begins with"
    FORM = "a generation begins whose joint state does not have the round"


S, E = RoundState, RoundEvent
OVER = S.LANDED, S.DROPPED
TRANSITIONS = Transitions(
    S.ABSENT,
    [
        Row((S.ABSENT, S.OPENED), E.CLAIM, S.CLAIMED),
        Row((S.ABSENT, S.OPENED), E.OPEN, S.OPENED),
        Row((S.CLAIMED,), E.OPEN, S.CLAIMED),
        Row((S.HELD,), E.OPEN, S.HELD),
        Row((S.ABSENT, S.OPENED, S.CLAIMED), E.HOLD, S.HELD),
        Row((S.OPENED, S.CLAIMED, S.HELD), E.LAUNCH, S.LAUNCHED),
        Row((S.LAUNCHED,), E.SUM, S.SUMMED),
        Row((S.SUMMED,), E.LAND, S.LANDED),
        Row((S.OPENED, S.HELD, S.LAUNCHED, S.SUMMED), E.DROP, S.DROPPED),
        Row((S.CLAIMED,), E.FORM, S.CLAIMED),
        Row((S.HELD, S.LAUNCHED, S.SUMMED), E.FORM, S.HELD),
        Row((S.OPENED,), E.FORM, S.ABSENT),
    ],
)


@dataclass
class RoundRecord:
    """What a worker has of a round."""

    key: str
    state: RoundState = TRANSITIONS.initial
    own: Launch | None = None
    """This worker's part, once it was held or launched."""
    cut: Round | None = None
    """The round as it is cut among the members of the generation; none before a part of it is here."""
    done: Completed | None = None
    """What came of it, once it is summed."""

    @property
    def contributes(self) -> bool:
        """Whether this worker gives something to it."""
        return self.own is not None and self.own.values is not None


class Ledger:
    """All rounds at one worker, in the order in which they were opened: the only owner of their states.

    Safe on any thread: the stepping thread claims rounds, and the exchange thread does the rest.
    """

    def __init__(self, buffers: BufferPool) -> None:
        self._records: dict[str, RoundRecord] = {}
        self._over: deque[str] = deque(maxlen=MOST_OVER)
        self._buffers = buffers
        self._lock = threading.Lock()

    def find(self, key: str) -> RoundRecord | None:
        """What is here of a round that is not over."""
        return self._records.get(key)

    def state(self, key: str) -> RoundState:
        """How far a round has come. One that landed or was dropped long ago is absent."""
        record = self._records.get(key)
        if record is None:
            return S.LANDED if key in self._over else S.ABSENT
        return record.state

    def allows(self, key: str, cause: RoundEvent) -> bool:
        """Whether an event may happen to a round as it is."""
        return TRANSITIONS.allows(self.state(key), cause)

    def records(self, *states: RoundState) -> list[RoundRecord]:
        """The rounds in these states, or all that are not over."""
        with self._lock:
            return [record for record in self._records.values() if not states or record.state in states]

    def move(self, key: str, cause: RoundEvent) -> RoundRecord:
        """Has an event happen to a round.

        Raises:
            InvalidTransitionError: The round's state does not allow the event.
        """
        with self._lock:
            record = self._records.get(key) or RoundRecord(key, self.state(key))
            record.state = TRANSITIONS.after(record.state, cause)
            if cause in (E.OPEN, E.HOLD) or record.state in (S.ABSENT, *OVER):
                self._records.pop(key, None)
            if record.state not in (S.ABSENT, *OVER):
                self._records[key] = record
            if record.state in OVER:
                self._end(record)
        return record

    def forget_over(self) -> None:
        """A generation begins: messages of rounds that are over come no more."""
        self._over.clear()

    def _end(self, record: RoundRecord) -> None:
        self._over.append(record.key)
        if record.own is not None and record.own.pooled and record.own.values is not None:
            self._buffers.give(record.own.values)
