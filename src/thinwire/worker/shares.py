"""What a worker has done since it last contributed a part of the model: its contributions are weighed by it."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.parameters import Fragment


class Shares:
    """Steps and rows that a worker had done when it last contributed, fragment by fragment."""

    def __init__(self) -> None:
        self._begun: tuple[int, float] = (0, 0)
        self._done: dict[Fragment, tuple[int, float]] = {}

    def start(self, steps: int, rows: float) -> None:
        """Counts from here: earlier steps, here or of a predecessor, are in the model that training goes on from.

        MPCA (Langer et al. 2018), eq. 9: a contribution counts by the steps that are in it.
        """
        self._begun, self._done = (steps, rows), {}

    def since(self, fragment: Fragment, steps: int, rows: float) -> tuple[int, float]:
        """Steps and rows since a fragment was last contributed.

        Of a fragment cut in another way than before, the part that has waited longest counts.
        """
        known = self._done.get(fragment)
        if known is None:
            parts = self._within(fragment)
            covered = sum(min(p.stop, fragment.stop) - max(p.start, fragment.start) for p in parts)
            known = min([self._done[piece] for piece in parts] + [self._begun] * (covered < fragment.size))
        return steps - known[0], rows - known[1]

    def parts(self, fragment: Fragment, steps: int, rows: float) -> list[tuple[Fragment, int, float]]:
        """The parts of a fragment, each with the steps and rows since it was last contributed."""
        found: list[tuple[Fragment, int, float]] = []
        at = fragment.start
        for piece in sorted(self._within(fragment)):
            start, stop = max(piece.start, fragment.start), min(piece.stop, fragment.stop)
            if start > at:
                found.append((Fragment(at, start), steps - self._begun[0], rows - self._begun[1]))
            found.append((Fragment(start, stop), steps - self._done[piece][0], rows - self._done[piece][1]))
            at = stop
        if at < fragment.stop:
            found.append((Fragment(at, fragment.stop), steps - self._begun[0], rows - self._begun[1]))
        return found

    def take(self, fragment: Fragment, steps: int, rows: float) -> tuple[int, float]:
        """Steps and rows since a fragment was last contributed, and books that it is contributed now."""
        found = self.since(fragment, steps, rows)
        for piece in self._within(fragment):
            done = self._done.pop(piece)
            for rest in (Fragment(piece.start, fragment.start), Fragment(fragment.stop, piece.stop)):
                if rest.size > 0:
                    self._done[rest] = done
        self._done[fragment] = (steps, rows)
        return found

    def _within(self, fragment: Fragment) -> list[Fragment]:
        """The pieces contributed before that a fragment has values of."""
        if fragment in self._done:
            return [fragment]
        return [piece for piece in self._done if piece.start < fragment.stop and fragment.start < piece.stop]

    def steps_at(self, fragment: Fragment) -> int | None:
        """Steps that were done when a fragment was last contributed; None where it never was."""
        return self._done[fragment][0] if fragment in self._done else None

    def has_any(self, steps: int) -> bool:
        """Whether there are steps since the last contribution."""
        return steps > max([self._begun[0]] + [done for done, _ in self._done.values()])

    def tree(self) -> list[list[float]]:
        return [[f.start, f.stop, steps, rows] for f, (steps, rows) in self._done.items()]

    def load(self, tree: Iterable[Iterable[float]]) -> None:
        self._done = {Fragment(int(a), int(b)): (int(steps), rows) for a, b, steps, rows in tree}
