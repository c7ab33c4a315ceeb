"""Which fragment a round is of, and which cycle it belongs to, under settings that change as a run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from thinwire.errors import CheckpointError
from thinwire.exchange.notes import is_setting
from thinwire.parameters import GRAIN, Fragment, fragments
from thinwire.strategies import Setting

FORMER = ("rate", "group")
"""What settings of earlier versions say too, and nobody reads."""


@dataclass(frozen=True)
class Cut:
    """A setting in force from round `since` on, when `cycles` cycles were behind."""

    size: int
    setting: Setting
    since: int = 0
    cycles: int = 0

    def fragment(self, round: int) -> Fragment:
        """The fragment of one round: they rotate."""
        return _pieces(self.size, self.count)[self.number(round)]

    def number(self, round: int) -> int:
        """Which of the fragments it is."""
        return (round - self.since) % self.count

    @property
    def count(self) -> int:
        """Fragments in rotation: no more than the model has grains, so that none is empty."""
        return max(1, min(self.setting.fragments, -(-self.size // GRAIN)))

    def cycle(self, round: int) -> int:
        """How often all fragments had their turn before this round.

        >>> cut = Cut(1000, Setting(fragments=3))
        >>> [cut.cycle(r) for r in range(7)]
        [0, 0, 0, 1, 1, 1, 2]
        """
        return self.cycles + max(0, round - self.since) // self.count


class Cuts:
    """The cuts of a run, newest last; every worker has the same."""

    def __init__(self, first: Cut) -> None:
        self._cuts = [first]

    @property
    def newest(self) -> Cut:
        return self._cuts[-1]

    def at(self, round: int) -> Cut:
        """The cut that holds for a round."""
        for cut in reversed(self._cuts):
            if cut.since <= round:
                return cut
        return self._cuts[0]

    def change(self, setting: Setting, since: int) -> None:
        """Puts a new setting in force from a round on; the same change twice counts once."""
        newest = self.newest
        if setting == newest.setting or since <= newest.since:
            return
        self._cuts = [*self._cuts[-3:], Cut(newest.size, setting, since, newest.cycle(since))]

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(cut) for cut in self._cuts]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Cuts:
        settings: list[Any] = [_without_former(d["setting"]) for d in data]
        if not data or not all(map(is_setting, settings)):
            raise CheckpointError("the settings of a joint state are damaged; go on from another checkpoint")
        read = [
            Cut(int(d["size"]), Setting(**setting), int(d["since"]), int(d["cycles"]))
            for d, setting in zip(data, settings, strict=True)
        ]
        cuts = cls(read[0])
        cuts._cuts = read
        return cuts


def _without_former(setting: Any) -> Any:
    return {k: v for k, v in setting.items() if k not in FORMER} if isinstance(setting, dict) else setting


@lru_cache(maxsize=16)
def _pieces(size: int, count: int) -> tuple[Fragment, ...]:
    return fragments(size, count)
