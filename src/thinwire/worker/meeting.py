"""What members of a group say when they meet, and what they agree on about publications."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """What one member says of publications."""

    heard: float
    """The number of the last one that it has heard of."""
    pending: float
    """The number of the first one that it has yet to see through; 0 for none."""
    ready: float
    """Whether it could see that one through now."""
    evaluates: float
    saves: float
    """The steps in the checkpoint's name; below 0 for none."""


class Said(NamedTuple):
    """What a member says before a step, beside its rows and their weight."""

    has_rows: float
    stops: float
    heard: float
    pending: float
    ready: float
    evaluates: float
    saves: float
    """These five are `Held`."""
    rows: float
    """Done so far."""
    flawed: float
    """Whether its parameters are not finite."""
    asked_by: float
    """The group of the peer that asks for the joint state; below 0 for none."""
    concludes: float
    others_steps: float
    """Steps of other groups that it has yet to take."""
    generation: float
    """The newest that it has heard of."""
    number: float
    """The last publication that it has heard of or is about to announce. The first member decides on the rest."""
    launch: float
    evaluate: float
    save: float
    stop: float

    @property
    def held(self) -> Held:
        return Held(self.heard, self.pending, self.ready, self.evaluates, self.saves)


class Awaits(NamedTuple):
    """What a member says while publications are seen through."""

    heard: float
    pending: float
    ready: float
    evaluates: float
    saves: float
    """These five are `Held`."""
    asked_by: float
    generation: float
    verdict: float
    """Whether it waits for one."""

    @property
    def held(self) -> Held:
        return Held(*self[: len(Held._fields)])


class Agreed(enum.Enum):
    """What members do next about publications."""

    NOTHING = "no member holds one"
    WAIT = "all hold the same one, and not all are ready"
    SEE_THROUGH = "all hold the same one, and are ready"
    UNHEARD = "some hold one that others may still hear of"
    DROP = "some hold one that others never will hear of"


def agree(told: Sequence[Held]) -> tuple[Agreed, int]:
    """What to do next, and with which publication; the same on all members, since all are told the same.

    >>> agree([Held(3, 3, 1, 1, -1), Held(3, 3, 0, 1, -1)])
    (<Agreed.WAIT: 'all hold the same one, and not all are ready'>, 3)
    >>> agree([Held(3, 3, 1, 1, -1), Held(2, 0, 0, 0, -1)])
    (<Agreed.UNHEARD: 'some hold one that others may still hear of'>, 3)
    >>> agree([Held(4, 3, 1, 1, -1), Held(4, 4, 1, 1, -1)])
    (<Agreed.DROP: 'some hold one that others never will hear of'>, 3)
    """
    first = min((int(said.pending) for said in told if said.pending), default=0)
    if not first:
        return Agreed.NOTHING, 0
    lacking = [said for said in told if said.pending != first]
    if not lacking:
        return (Agreed.SEE_THROUGH if all(said.ready for said in told) else Agreed.WAIT), first
    return (Agreed.DROP if all(said.heard >= first for said in lacking) else Agreed.UNHEARD), first
