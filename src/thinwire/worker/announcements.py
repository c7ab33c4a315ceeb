"""What the first worker has announced, until it is published or the others are seen to have done so without it."""

from __future__ import annotations

from typing import Any


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

    def __bool__(self) -> bool:
        return self._last > self._over

    def add(self, note: dict[str, Any]) -> dict[str, Any]:
        """The note, as one that is told from everybody else's."""
        self._last += 1
        return note | {"by": self._by, "n": self._last}

    def over(self, note: dict[str, Any]) -> None:
        """This one, if it is this worker's, and all before it need no longer be waited for."""
        if note.get("by") == self._by:
            self._over = max(self._over, int(note["n"]))

    def lead(self, leads: bool) -> None:
        """A generation has begun: where another leads it, that one announces what it likes."""
        self._over = self._over if leads else self._last
