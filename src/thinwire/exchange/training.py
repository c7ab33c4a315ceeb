"""How training's own traffic moves, as five narrow ports: `Mesh` in rounds of all workers, `Table` by each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.exchange.means import Means
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Feeding, Launching, Tree
from thinwire.exchange.round import Launch
from thinwire.exchange.signals import Averaged
from thinwire.exchange.station import Station
from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import Commit


class Viewing(Protocol):
    """The joint model, outside of rounds."""

    def open(self, generation: int, model: Tensor | None) -> None:
        """The main thread has heard of the generation, and gives its replica where that is the joint model."""

    def view(self, key: str) -> None:
        """Tells the main thread the joint model."""

    def announce(self, note: Note) -> None:
        """Tells the first worker something outside of a round."""


class Forming(Protocol):
    """What a new generation means for training."""

    def prepare(self) -> Tree | None:
        """Lands what can be landed: a generation is about to form. What to say of the table's tuples, if any."""

    def holds(self, commit: Commit) -> bool:
        """Whether this worker has what the reference of a commit has."""

    def restarts(self, commit: Commit) -> bool:
        """Whether the joint model is lost, and this worker's replica takes its place."""

    def go_on(self, commit: Commit, held: list[Launch]) -> None:
        """Takes up what was under way, in a generation that has just begun."""

    def load(self, tree: Tree) -> None:
        """Takes over the joint state that a peer sent."""

    def caught(self) -> None:
        """The main thread has been told that the joint state is here."""

    def asked(self, peer: int) -> None:
        """A peer needs the joint state."""


class Turning(Protocol):
    """What each turn of the exchange thread brings."""

    def receive(self, sender: int, body: Body, payload: memoryview | None) -> None:
        """Takes in a message that is not of rounds."""

    def work(self) -> None:
        """Goes on with what is under way, while no generation is forming."""

    def waiting_for(self) -> dict[str, list[int]]:
        """What is under way, and the workers that each waits for."""

    def close(self) -> None:
        """Lets go of what it holds beside the link."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One kind of traffic, by what is asked of it."""

    launching: Launching
    feeding: Feeding
    viewing: Viewing
    forming: Forming
    turning: Turning


Kind = Callable[[Station, Means], Training]
"""Makes the traffic of one worker."""


class Unfed:
    """Contributions that go out whole: there is nothing to feed."""

    tuples: Sequence[Fragment] = ()

    def feed(self, round: int, keys: list[int], absent: frozenset[int] = frozenset()) -> None:
        return

    def withhold(self, round: int) -> None:
        return

    def abandon(self, round: int) -> None:
        return


class ModelHere:
    """A joint model that every worker has."""

    def __init__(self, station: Station) -> None:
        self._station = station

    def open(self, generation: int, model: Tensor | None) -> None:
        return

    def view(self, key: str) -> None:
        model = self._station.joint.model
        self._station.signals.put(Averaged(key, torch.zeros(0) if model is None else model.clone(), {}))

    def announce(self, note: Note) -> None:
        return
