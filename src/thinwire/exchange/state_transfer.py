"""The joint state on its way from the worker that has it to one that asked, in pieces that may get lost."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.protocol.chunks import Reassembly, pieces
from thinwire.protocol.clock import Clock
from thinwire.protocol.messages import State, Want

WANT_S = 5.0
"""Without a piece for so long, what was asked for is asked for again: then after twice as long."""


class StateTransfer:
    """What one worker gives, and what it waits for; `tell` sends a message of a kind to a peer."""

    def __init__(self, tell: Callable[..., None], clock: Clock) -> None:
        self._tell, self._clock = tell, clock
        self._given = 0
        self._from = -1
        self._since, self._patience_s = 0.0, WANT_S
        self._parcel = Reassembly(0)

    def give(self, peer: int, data: bytes, generation: int) -> None:
        """Sends a peer what it asked for in a generation; in another it may lack what that one began with.

        All pieces have the same number, so that two states are not mixed.
        """
        self._given += 1
        for index, count, piece in pieces(data):
            self._tell(peer, State, piece, generation=generation, index=index, count=count, number=self._given)

    def want(self, giver: int) -> None:
        """Asks for it."""
        self._from, self._patience_s, self._parcel = giver, WANT_S, Reassembly(0)
        self._ask()

    def tick(self) -> None:
        """Asks again, where nothing has come for long."""
        if self._clock() - self._since > self._patience_s:
            self._patience_s *= 2
            self._ask()

    def take(self, sender: int, state: State, payload: memoryview) -> bytes | None:
        """A piece; the whole with the last one."""
        if sender != self._from or state.number < self._parcel.name:
            return None
        self._since = self._clock()
        if state.number > self._parcel.name:
            self._parcel = Reassembly(state.number)
        return self._parcel.add(state.index, state.count, payload)

    def _ask(self) -> None:
        self._since = self._clock()
        self._tell(self._from, Want)
