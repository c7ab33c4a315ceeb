"""The joint state on its way from the worker that has it to a worker that asked, in pieces that may get lost."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.errors import ProtocolError
from thinwire.exchange.ports import Tree
from thinwire.exchange.signals import Caught
from thinwire.exchange.station import Station
from thinwire.exchange.training import Forming
from thinwire.protocol.chunks import Reassembly, pieces
from thinwire.protocol.messages import State, Want

WANT_S = 5.0
"""Without a piece for this time, the state is asked for again: then after twice the time."""
MOST_WANTS = 4096


class StateTransfer:
    """What one worker gives, and what it waits for."""

    def __init__(self, station: Station, forming: Forming) -> None:
        self._station, self._forming = station, forming
        self._fits: Callable[[Tree], bool] = lambda tree: True
        self._wants: list[tuple[int, int]] = []
        self._given = 0
        self._from = -1
        self._since, self._patience_s = 0.0, WANT_S
        self._parcel = Reassembly(0)

    def expects(self, fits: Callable[[Tree], bool]) -> None:
        """Says whether the main thread can take over what a peer gives."""
        self._fits = fits

    # -- giving -----------------------------------------------------------------------------------------------------

    def give(self, peer: int, data: bytes, generation: int) -> None:
        """Sends a peer what it asked for in a generation; in another it may lack what that one began with.

        All pieces have the same number, so that two states are not mixed.
        """
        self._given += 1
        for index, count, piece in pieces(data):
            number = self._given
            self._station.tell(peer, State, piece, generation=generation, index=index, count=count, number=number)

    def asked(self, peer: int, generation: int) -> None:
        """A peer asks for it; in a generation whose commit has not come yet it waits for that."""
        self._wants = [*self._wants[-MOST_WANTS:], (generation, peer)]
        self.answer()

    def answer(self) -> None:
        """Passes requests of this generation on to the main thread."""
        generation, frozen = self._station.rounds.generation, self._station.standing.frozen
        now = [peer for g, peer in self._wants if g == generation and not frozen]
        self._wants = [(g, peer) for g, peer in self._wants if g >= generation and peer not in now]
        for peer in now:
            self._forming.asked(peer)

    # -- taking -----------------------------------------------------------------------------------------------------

    def want(self, giver: int) -> None:
        """Asks for it."""
        self._from, self._patience_s, self._parcel = giver, WANT_S, Reassembly(0)
        self._ask()

    def tick(self) -> None:
        """Asks again, where it is needed and nothing has come for long."""
        if self._station.standing.needs_state and self._station.time.now() - self._since > self._patience_s:
            self._patience_s *= 2
            self._ask()

    def take(self, sender: int, state: State, payload: memoryview | None) -> None:
        """Takes in a piece, and with the last one the joint state.

        Raises:
            ProtocolError: What has come is no joint state that this worker can take over.
        """
        standing = self._station.standing
        out_of_place = standing.frozen or state.generation != self._station.rounds.generation
        if out_of_place or not standing.needs_state or payload is None:
            return
        data = self._collect(sender, state, payload)
        if data is None:
            return
        tree = self._station.trees.decode(data)
        if not isinstance(tree, dict) or not isinstance(tree.get("joint"), dict) or not self._fits(tree):
            raise ProtocolError(f"worker {sender} sent a joint state that is not one")
        if int(tree["joint"]["landed"]) < standing.landed:
            return  # copied before this generation: no worker launches the rounds between again, a newer state comes
        model = self._station.joint.model
        old = None if model is None else model.clone()
        self._forming.load(tree)
        standing.needs_state, standing.since = False, self._station.rounds.generation
        standing.published = int(tree.get("published", 0))
        self._station.signals.put(Caught(tree, old))
        self._forming.caught()
        self._station.synchronised()

    def _collect(self, sender: int, state: State, payload: memoryview) -> bytes | None:
        """All pieces as one, once the last is here."""
        if sender != self._from or state.number < self._parcel.name:
            return None
        self._since = self._station.time.now()
        if state.number > self._parcel.name:
            self._parcel = Reassembly(state.number)
        return self._parcel.add(state.index, state.count, payload)

    def _ask(self) -> None:
        self._since = self._station.time.now()
        self._station.tell(self._from, Want)
