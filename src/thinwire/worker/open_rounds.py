"""Rounds that a worker has launched and that have not landed."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from thinwire.exchange.buffer_pool import BufferPool
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import RoundsPort
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.worker.ports import Wait
from thinwire.worker.step_statistics import StepStatistics


@final
class OpenRounds:
    """Launches rounds, and keeps what each was launched with.

    Args:
        note: what is said with a round, given its number, what its launcher says, and whether it may announce.
        round_s: the longest wait for a round.
        in_flight: rounds that may be under way at once.
        landed: rounds in the joint state at the beginning.
    """

    def __init__(
        self,
        exchange: RoundsPort,
        meter: StepStatistics,
        wait: Wait,
        *,
        note: Callable[[int, Note, bool], Note],
        round_s: float,
        in_flight: int,
        landed: int,
    ) -> None:
        self._exchange, self._meter, self._wait, self._note = exchange, meter, wait, note
        self._round_s = round_s
        self._launched: dict[int, tuple[Fragment, Snapshot | None]] = {}
        self.spares = BufferPool(in_flight + 1)
        self.landed = self.adopted = landed
        """Rounds that have landed here, and those of them that the replica has taken over."""

    def __len__(self) -> int:
        return len(self._launched)

    def __contains__(self, round: int) -> bool:
        return round in self._launched

    @property
    def next(self) -> int:
        """The number of the round that would be claimed next."""
        return self._exchange.next_round

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round that this worker is to launch next."""
        return self._exchange.claim()

    def launch(
        self,
        round: int,
        fragment: Fragment,
        snapshot: Snapshot | None,
        weight: float,
        *,
        note: Note | None = None,
        announces: bool = True,
    ) -> None:
        """Contributes to a claimed round; `note` is said with it, beside what all contributions say."""
        self._launched[round] = (fragment, snapshot)
        self._meter.flies(len(self._launched))
        self._exchange.launch(round, fragment, snapshot, weight, self._note(round, note or {}, announces))

    def launch_nothing(self) -> None:
        """Takes part in the next round without contributing."""
        round, fragment = self.claim()
        self.launch(round, fragment, None, 0.0, announces=False)

    def land(self, round: int, fragment: Fragment) -> tuple[Fragment, Snapshot | None]:
        """A round has landed; returns what it was launched with, and its own fragment where another worker did."""
        launched = self._launched.pop(round, (fragment, None))
        self._meter.flies(len(self._launched))
        self.landed = round + 1
        return launched

    def overtake(self, landed: int) -> list[tuple[Fragment, Snapshot | None]]:
        """A joint state has come that has these rounds in it: returns what the open ones of them were launched with."""
        self.landed = self.adopted = landed
        return [self._launched.pop(round) for round in sorted(self._launched) if round < landed]

    def wait_for(self, round: int) -> None:
        """Waits until a round has landed; the wait is no part of the step's time."""
        began = self._meter.now()
        self._wait(lambda: round not in self._launched, f"round {round}", self._round_s)
        self._meter.waited(self._meter.now() - began)

    def wait_for_all(self, what: str, *, and_also: Callable[[], bool] = lambda: True) -> None:
        """Waits until all have landed, and something else is so."""
        self._wait(lambda: not self._launched and and_also(), what, self._round_s)

    def wait_until_landed(self, over: Callable[[], bool]) -> None:
        """Waits for rounds that other workers began without this one, until they have landed or it is over."""
        until = lambda: over() or self.landed >= self._exchange.next_round  # noqa: E731
        self._wait(until, "a round that began without it", self._round_s)

    def wait_for_newest(self) -> None:
        """Waits until the round that was launched last has landed, where any is under way."""
        if self._launched:
            self.wait_for(max(self._launched))

    def settle(self) -> None:
        """Makes the copies that the exchange thread has not come to: the vector is about to change."""
        for snapshot in [snapshot for _, snapshot in self._launched.values() if snapshot is not None]:
            snapshot.settle()

    def rebase(self, base: Callable[[Fragment], Snapshot]) -> None:
        """Rounds under way land as if they had been launched with other values."""
        self._launched = {r: (f, None if s is None else base(f)) for r, (f, s) in self._launched.items()}

    def forget(self, round: int) -> None:
        """A round is given up."""
        self._launched.pop(round, None)

    def clear(self) -> None:
        """What lands from now on is a step of other workers."""
        self._launched.clear()
