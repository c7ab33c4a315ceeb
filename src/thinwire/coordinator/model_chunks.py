"""The trained model as it comes in: by part of a replica, in chunks, each in pieces."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.protocol.messages import ModelPiece, Shown

Show = Callable[[int, dict[int, dict[int, bytes]]], bool]
"""Shows a model of an evaluation; says whether the run is to stop."""

MOST_SHOWN = 4
"""Evaluations whose models may be on their way at once: a worker that was lost never sends the rest of one."""


class ModelChunks:
    """Takes pieces in until every part of a replica is whole."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._pieces: dict[tuple[int, int], dict[int, bytes]] = {}
        self._done: set[int] = set()
        self.results: dict[int, dict[int, bytes]] = {}
        """By part and number, the chunks that are whole."""

    def take(self, result: ModelPiece, payload: memoryview) -> bool:
        """A piece of a part that there is; whether all is there now. What was whole stays as it is."""
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
        """Whether all is there."""
        return len(self._done) == self._parts


class ShownModels:
    """Takes in the joint models of evaluations, by their numbers."""

    def __init__(self, parts: int, show: Show | None) -> None:
        self._parts, self._show = parts, show
        self._coming: dict[int, ModelChunks] = {}
        self._newest = 0

    def hear(self, shown: Shown, payload: memoryview | None) -> bool | None:
        """Whether who is shown the model asks to stop; None where the piece is not what it must be."""
        if payload is None or self._show is None or shown.part >= self._parts:
            return None
        whole = self.take(shown, payload)
        return whole is not None and self._show(shown.number, whole)

    def take(self, shown: Shown, payload: memoryview) -> dict[int, dict[int, bytes]] | None:
        """The model, once its last piece has come; pieces of one that is older than the last whole one are dropped."""
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
