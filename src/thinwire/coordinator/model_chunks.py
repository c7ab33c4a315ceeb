"""Receives the trained model: by part of a replica, in chunks, each split into pieces."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.protocol.messages import ModelPiece, Shown

Show = Callable[[int, dict[int, dict[int, bytes]]], bool]
"""Passes the model of an evaluation to a callback; returns whether the run is to stop."""

MOST_SHOWN = 4
"""Evaluations whose models may be arriving at once; a lost worker never sends the rest of its pieces."""


class ModelChunks:
    """Collects pieces until every part of a replica is whole."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._pieces: dict[tuple[int, int], dict[int, bytes]] = {}
        self._done: set[int] = set()
        self.results: dict[int, dict[int, bytes]] = {}
        """Whole chunks, by part and number."""

    def take(self, result: ModelPiece, payload: memoryview) -> bool:
        """Takes in a piece; returns whether the model is whole. Pieces after that change nothing."""
        if self.whole:
            return True
        part, chunk = result.part, result.chunk
        pieces = self._pieces.setdefault((part, chunk), {})
        pieces[result.index] = bytes(payload)
        found = self.results.setdefault(part, {})
        if len(pieces) == result.count:
            found[chunk] = b"".join(pieces[i] for i in sorted(pieces))
            del self._pieces[part, chunk]
        if len(found) == result.chunks:
            self._done.add(part)
        return self.whole

    @property
    def whole(self) -> bool:
        """Whether all parts are whole."""
        return len(self._done) == self._parts


class ShownModels:
    """Receives the joint models of evaluations, by number."""

    def __init__(self, parts: int, show: Show | None) -> None:
        self._parts, self._show = parts, show
        self._coming: dict[int, ModelChunks] = {}
        self._newest = 0

    def hear(self, shown: Shown, payload: memoryview | None) -> bool | None:
        """Whether the callback asks to stop; None where the piece is refused."""
        if payload is None or self._show is None or shown.part >= self._parts:
            return None
        whole = self.take(shown, payload)
        return whole is not None and self._show(shown.number, whole)

    def take(self, shown: Shown, payload: memoryview) -> dict[int, dict[int, bytes]] | None:
        """The model, once its last piece has arrived; pieces of a model older than the last whole one are dropped."""
        if shown.number <= self._newest:
            return None
        chunks = self._coming.setdefault(shown.number, ModelChunks(self._parts))
        while len(self._coming) > MOST_SHOWN:
            del self._coming[min(self._coming)]
        if not chunks.take(shown, payload):
            return None
        self._newest = shown.number
        self._coming = {number: held for number, held in self._coming.items() if number > shown.number}
        return chunks.results
