"""What the first worker has announced, until it is published or the others are seen to have done so without it."""

from __future__ import annotations

from typing import Any, final


@final
class Announcements:
    """Announcements of one worker. They are made, and published, one after the other.

    >>> mine = Announcements("0.0")
    >>> first, second = mine.add({"publish": 1}), mine.add({"publish": 2})
    >>> mine.over({"publish": 1, "by": "1.0", "n": 1}), bool(mine)
    (None, True)
    >>> mine.over(second), bool(mine)
    (None, False)
    """

    def __init__(self, by: str) -> None:
        self._by, self._last, self._over = by, 0, 0
        self._by_round: dict[int, dict[str, Any]] = {}
        """Notes of rounds that have not landed."""
        self._lost: dict[str, Any] = {}
        """The note of a round that a quorum completed without this worker: it is announced again with the next one."""

    def __bool__(self) -> bool:
        return self._last > self._over

    def add(self, note: dict[str, Any]) -> dict[str, Any]:
        """The note with the name of this worker and a number."""
        self._last += 1
        return note | {"by": self._by, "n": self._last}

    def over(self, note: dict[str, Any]) -> None:
        """This announcement, if it is this worker's, and all before it are no longer waited for."""
        if note.get("by") == self._by:
            self._over = max(self._over, int(note["n"]))

    def lead(self, leads: bool) -> None:
        """A generation has begun: its first worker announces anew what it wants published."""
        self._over = self._over if leads else self._last

    # -- with rounds ------------------------------------------------------------------------------------------------

    def say(self, round: int, note: dict[str, Any]) -> dict[str, Any]:
        """Announces with a round; an empty note announces nothing."""
        if note:
            self._by_round[round] = note = self.add(note)
        return note

    def landed(self, round: int, *, heard: bool) -> None:
        """A round has landed, with this worker's note or without it."""
        note = self._by_round.pop(round, None)
        if note is not None and not heard:
            self._lost = note

    def take_lost(self) -> dict[str, Any]:
        """The note to announce again; empty for none."""
        lost, self._lost = self._lost, {}
        return lost

    @property
    def newest(self) -> int:
        """The highest number of a publication that is announced and has not landed; 0 for none."""
        notes = [*self._by_round.values(), *([self._lost] if self._lost else [])]
        return max((int(note["publish"]) for note in notes), default=0)

    def clear(self) -> None:
        """Of all that was announced with rounds, nothing is left to come."""
        self._by_round.clear()
