"""One round at one worker: how its fragment is cut, and what it does to the residuals of error feedback."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from thinwire.parameters import Fragment, fragments
from thinwire.rules.compression import Codec
from thinwire.rules.finite import count_not_finite, is_finite

CHUNK_BYTES = 1 << 20
"""Packed bytes of one message: large enough to be cheap, small enough to overlap."""
BY_DESIGN = ("buffers",)
"""Kinds of rounds whose values may be infinite, as those of a mask are; their workers look at them."""
KNOWN = -1.0
"""In place of a weight: this is no share of a mean but the mean itself, as an earlier generation came to it."""
MOST_WEIGHT = 1e30


class Chunk(NamedTuple):
    """A piece of a fragment, relative to its start, and the worker that sums it."""

    owner: int
    start: int
    stop: int
    first: bool
    """Whether it is its slice's first, the one that carries the notes."""


class Launch(NamedTuple):
    """A worker's own contribution to a round, kept so that a new generation can launch it again."""

    key: str
    fragment: Fragment
    codec: str
    values: Tensor | None
    weight: float
    note: dict[str, Any]
    pooled: bool = False
    """Whether the values lie in a buffer that is used again when the round is over."""


class Lane(NamedTuple):
    """How one round is packed: its codec, and the residual vectors (full length) when feedback is wanted."""

    codec: Codec
    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    resend: bool = False
    """Whether a contribution left out goes back into the residual."""


class Completed(NamedTuple):
    """A round that every owner has summed."""

    key: str
    fragment: Fragment
    mean: Tensor
    notes: dict[int, dict[str, Any]]
    seconds: float
    size_bytes: int
    """What this worker sent for it."""
    members: int
    late: tuple[int, ...]
    """Workers whose contributions missed at least one chunk."""
    dropped: tuple[int, ...] = ()
    """Workers whose contributions to at least one chunk were not finite."""
    empty: bool = False
    """Whether nobody contributed to any chunk."""


def cut(fragment: Fragment, members: Collection[int], bits: int) -> tuple[Chunk, ...]:
    """The chunks of a fragment: a slice per member in the order of their numbers, none above CHUNK_BYTES packed."""
    longest = CHUNK_BYTES * 8 // bits
    found = []
    for owner, piece in zip(sorted(members), fragments(fragment.size, len(members)), strict=True):
        for start in range(piece.start, piece.stop, longest):
            found.append(Chunk(owner, start, min(piece.stop, start + longest), start == piece.start))
    return tuple(found)


class OfChunk(TypedDict):
    """What all messages of a chunk say."""

    generation: int
    attempt: int
    round: str
    span: tuple[int, int]
    codec: str
    chunk: int


@dataclass
class Round:
    """One round among the members of one generation. Its methods do the arithmetic; messages are left to `Summing`.

    What is contributed is never lost and never counted twice: at any moment values plus residuals equal what was landed
    plus what is still owed. `sent` holds what this worker has put on the wire, `before` the owner's residuals as they
    were, so that a round which is given up can be undone.
    """

    key: str
    fragment: Fragment
    lane: Lane
    chunks: tuple[Chunk, ...]
    started: float
    mean: Tensor
    generation: int = 0
    attempt: int = 0
    """This worker's own."""
    members: tuple[int, ...] = ()
    values: Tensor | None = None
    weight: float = 0.0
    note: dict[str, Any] = field(default_factory=dict)
    parts: dict[int, dict[int, tuple[float, Tensor | None]]] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Those that sums carry, this worker's own sums among them. All workers hear the same."""
    to_pass_on: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Notes that are to go with the first of the chunks that this worker sums."""
    late: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    flaws: dict[int, int] = field(default_factory=dict)
    """How many values of each worker's part of the chunk summed last are not finite, for those that it is without."""
    empty: set[int] = field(default_factory=set)
    """Chunks that nobody contributed to."""
    quorum_since: dict[int, float] = field(default_factory=dict)
    size_bytes: int = 0

    def contribute(self, own: Launch, now: float) -> None:
        """Takes this worker's part."""
        self.values = own.values if own.weight > 0 or own.weight == KNOWN else None
        self.weight = own.weight if own.values is not None else 0.0
        self.note, self.started = own.note, now

    def completed(self, now: float) -> Completed:
        """What came of it, once each of its chunks is summed."""
        return Completed(
            self.key,
            self.fragment,
            self.mean,
            dict(sorted(self.notes.items())),
            now - self.started,
            self.size_bytes,
            len(self.members),
            tuple(sorted(self.late)),
            tuple(sorted(self.dropped)),
            len(self.empty) == len(self.chunks),
        )

    def stamp(self, index: int) -> OfChunk:
        """What all messages of a chunk say."""
        return {
            "generation": self.generation,
            "attempt": self.attempt,
            "round": self.key,
            "span": (self.fragment.start, self.fragment.stop),
            "codec": self.lane.codec.name,
            "chunk": index,
        }

    def size(self, index: int) -> int:
        return self.chunks[index].stop - self.chunks[index].start

    def piece(self, vector: Tensor, index: int) -> Tensor:
        """A chunk of a vector as long as the fragment."""
        return vector[self.chunks[index].start : self.chunks[index].stop]

    def pack(self, index: int) -> Tensor | None:
        """This worker's part for another owner, packed; what packing loses stays in the residual."""
        if self.values is None:
            return None
        values, residual = self.piece(self.values, index), self._of(self.lane.residual, index)
        if residual is None:  # float32 goes out as it lies there: nobody writes it until the round is over
            return self.lane.codec.encode(values) if self.lane.codec.lossy else values.view(torch.uint8)
        packed = self.lane.codec.encode_feedback(values, residual)
        self.sent[index] = packed
        return packed

    def own(self, index: int) -> Tensor | None:
        """This worker's part for itself: it never crosses the wire, so it is exact and leaves no residual."""
        if self.values is None:
            return None
        values, residual = self.piece(self.values, index), self._of(self.lane.residual, index)
        if residual is None:
            return values
        exact = values + residual
        residual.zero_()
        self.sent[index] = exact
        return exact

    def sum(self, index: int, parts: dict[int, tuple[float, Tensor | None]]) -> Tensor | None:
        """The packed weighted mean of a chunk, which goes into `mean` as all will decode it; None if nobody counts.

        The sum is checked while it is in the cache, or its scales once it is packed. Only where it is not finite each
        part is looked at, and it is taken anew of those that are; none is left where they are too large together.
        """
        known = next((piece for weight, piece in parts.values() if weight == KNOWN and piece is not None), None)
        if known is not None:
            mean = self.piece(self.mean, index)
            mean.copy_(known.view(torch.float32))
            return mean.clone().view(torch.uint8)
        packed = self._summed(index, parts)
        self.flaws = {}
        if packed is None or self._is_finite(index, packed):
            return packed
        counted = {worker for worker, (weight, piece) in parts.items() if weight > 0 and piece is not None}
        self.flaws = {worker: n for worker in counted if (n := self._count_not_finite(index, *parts[worker]))}
        self._undo(index)
        packed = self._summed(index, {worker: part for worker, part in parts.items() if worker not in self.flaws})
        if packed is None or self._is_finite(index, packed):
            return packed
        self.flaws = dict.fromkeys(counted, count_not_finite(self.piece(self.mean, index)))
        self._undo(index)
        return None

    def _decoded(self, index: int, piece: Tensor) -> Tensor:
        return piece if piece.dtype == torch.float32 else self.lane.codec.decode(piece, self.size(index))

    def _count_not_finite(self, index: int, weight: float, piece: Tensor | None) -> int:
        assert piece is not None
        return count_not_finite(self._decoded(index, piece) * weight)

    def _is_finite(self, index: int, packed: Tensor) -> bool:
        """Whether a chunk's mean is, which lies in `mean` now."""
        codec = self.lane.codec
        if self.key.partition(":")[0] in BY_DESIGN:
            return True
        return codec.is_finite(packed, self.size(index)) if codec.bits < 16 else is_finite(self.piece(self.mean, index))

    def _undo(self, index: int) -> None:
        before = self.before.pop(index, None)
        residual = self._of(self.lane.owner_residual, index)
        if before is not None and residual is not None:
            residual.copy_(before)

    def _summed(self, index: int, parts: dict[int, tuple[float, Tensor | None]]) -> Tensor | None:
        codec, mean = self.lane.codec, self.piece(self.mean, index)
        total_weight = sum(weight for weight, _ in parts.values())
        if total_weight <= 0:
            return None
        residual = self._of(self.lane.owner_residual, index)
        exact = not codec.lossy and residual is None
        total = mean.zero_() if exact else torch.zeros(self.size(index))
        for worker in sorted(parts):
            weight, piece = parts[worker]
            if piece is None:
                continue
            if piece.dtype == torch.float32:
                total.add_(piece, alpha=weight)
            else:
                codec.accumulate(piece, weight, total)
        total.div_(total_weight)
        if exact:
            return total.clone().view(torch.uint8)  # the mean is written again when it is merged
        if residual is None:
            packed = codec.encode(total)
        else:
            self.before[index] = residual.clone()
            packed = codec.encode_feedback(total, residual)
        codec.decode(packed, self.size(index), out=mean)
        return packed

    def missed(self, index: int) -> None:
        """A chunk was summed without this worker: what it had for it waits for the next round."""
        residual = self._of(self.lane.residual, index)
        if not self.lane.resend or residual is None or self.values is None:
            return
        values = self.piece(self.values, index)
        sent = self.sent.pop(index, None)
        if sent is None:
            residual.add_(values)
        else:
            self._add_back(residual, sent)
        values.zero_()  # it is owed by the residual now, and must not be contributed again

    def take_back(self) -> None:
        """Undoes what a given-up round did to the residuals, so that its values can be launched again."""
        for index, sent in self.sent.items():
            residual = self._of(self.lane.residual, index)
            assert residual is not None
            assert self.values is not None
            self._add_back(residual, sent)
            residual.sub_(self.piece(self.values, index))
        for index, before in self.before.items():
            owed = self._of(self.lane.owner_residual, index)
            assert owed is not None
            owed.copy_(before)

    def _add_back(self, residual: Tensor, sent: Tensor) -> None:
        if sent.dtype == torch.float32:
            residual.add_(sent)
        else:
            self.lane.codec.accumulate(sent, 1.0, residual)

    def _of(self, vector: Tensor | None, index: int) -> Tensor | None:
        """A chunk of a vector as long as the model."""
        if vector is None:
            return None
        chunk = self.chunks[index]
        return vector[self.fragment.start + chunk.start : self.fragment.start + chunk.stop]
