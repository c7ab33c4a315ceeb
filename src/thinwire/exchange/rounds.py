"""The mesh's arithmetic of rounds: scatter slices to their owners, sum there, gather the sums. No sockets in here.

A round has a key ("train:12"), a fragment and a codec. Its fragment is cut into one slice per worker, each slice into
chunks, so that a chunk's sum travels back while the next is still coming::

    worker i                      owner of chunk c                          every worker
    part(key, c, Q(dᵢ), wᵢ)  ─▶   Δ = Σ wᵢ deq(qᵢ) / Σ wᵢ   sum(key, c, Q'(Δ))  ─▶   mean[c] = deq(Q'(Δ))

With a lossy codec both Q carry error feedback: the worker's for what it sends, the owner's for what it sums. Sums are
taken in the order of the workers' numbers, so that every run of the same rounds gives the same bits, and the owner uses
its own packed sum, so that all workers hold the same mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.engine.ports import Clock, Header
from thinwire.errors import ProtocolError
from thinwire.parameters import Fragment, fragments
from thinwire.rules.compression import Codec, codec

CHUNK_BYTES = 1 << 20
"""Packed bytes of one message: large enough to be cheap, small enough to overlap."""

Send = Callable[[int, Header, "memoryview | None"], None]


class Chunk(NamedTuple):
    """A piece of a fragment, relative to its start, and the worker that sums it."""

    owner: int
    start: int
    stop: int
    first: bool
    """Whether it is its slice's first, the one that carries the notes."""


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


class Launch(NamedTuple):
    """A worker's own contribution to a round, kept so that a new generation can launch it again."""

    key: str
    fragment: Fragment
    codec: str
    values: Tensor | None
    weight: float
    note: dict[str, Any]


class Lane(NamedTuple):
    """How one round is packed: its codec, and the residual vectors (full length) when feedback is wanted."""

    codec: Codec
    residual: Tensor | None = None
    owner_residual: Tensor | None = None
    resend: bool = False
    """Whether a contribution left out goes back into the residual."""


@dataclass
class _Round:
    key: str
    fragment: Fragment
    lane: Lane
    chunks: tuple[Chunk, ...]
    started: float
    launched: bool = False
    values: Tensor | None = None
    weight: float = 0.0
    mean: Tensor | None = None
    parts: dict[int, dict[int, tuple[float, Tensor | None]]] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    quorum_since: dict[int, float] = field(default_factory=dict)
    size_bytes: int = 0


def cut(fragment: Fragment, members: Collection[int], bits: int) -> tuple[Chunk, ...]:
    """The chunks of a fragment: a slice per member in the order of their numbers, none above CHUNK_BYTES packed."""
    longest = CHUNK_BYTES * 8 // bits
    found = []
    for owner, piece in zip(sorted(members), fragments(fragment.size, len(members)), strict=True):
        for start in range(piece.start, piece.stop, longest):
            found.append(Chunk(owner, start, min(piece.stop, start + longest), start == piece.start))
    return tuple(found)


class Rounds:
    """One worker's part in all rounds of a generation, as a machine: calls in, messages out through `send`."""

    def __init__(
        self,
        me: int,
        send: Send,
        lane: Callable[[str, str], Lane],
        *,
        quorum: float = 1.0,
        grace_s: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._me = me
        self._send = send
        self._lane = lane
        self._quorum = quorum
        self._grace_s = grace_s
        self._clock = clock
        self._open: dict[str, _Round] = {}
        self._finished: list[str] = []
        self._completed: list[Completed] = []
        self._early: list[tuple[int, Header, memoryview | None]] = []
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.attempts: dict[int, int] = {}
        self.refused = 0
        """Messages that were not what they must be."""

    def configure(self, generation: int, attempts: dict[int, int]) -> list[Launch]:
        """Starts a generation of these workers; returns the rounds that were open, to be launched again."""
        given_up = [r for r in self._open.values() if r.launched]
        for pending in given_up:
            self._take_back(pending)
        self._open = {}
        self._finished = []
        self.generation, self.attempts = generation, dict(attempts)
        self.members = tuple(sorted(attempts))
        early, self._early = self._early, []
        for sender, header, payload in early:
            self.receive(sender, header, payload)
        return [Launch(r.key, r.fragment, r.lane.codec.name, r.values, r.weight, r.note) for r in given_up]

    def launch(self, own: Launch) -> None:
        """Contributes to a round; with no values this worker only sums and listens."""
        entry = self._entry(own.key, own.fragment, own.codec)
        if entry is None or entry.launched:
            return
        entry.launched, entry.note = True, own.note
        entry.values = own.values if own.weight > 0 else None
        entry.weight = own.weight if own.values is not None else 0.0
        entry.started = self._clock()
        owners = {chunk.owner for chunk in entry.chunks}
        for peer in self.members:  # who owns nothing of it would not hear of the round otherwise
            if peer != self._me and peer not in owners:
                self._send(peer, self._header("open", entry, 0), None)
        for index, chunk in enumerate(entry.chunks):
            if index in entry.done:
                self._came_too_late(entry, index)
            elif chunk.owner != self._me:
                self._send_part(entry, index)
        for index, chunk in enumerate(entry.chunks):
            if index not in entry.done and chunk.owner == self._me:
                self._own_part(entry, index)
                self._try_sum(entry, index)
        self._try_complete(entry)

    def wanted(self) -> list[tuple[str, Fragment, str]]:
        """Rounds that others have launched and this worker has not."""
        return [(r.key, r.fragment, r.lane.codec.name) for r in self._open.values() if not r.launched]

    def waiting_for(self) -> dict[str, list[int]]:
        """Open rounds, and the workers each still misses something from."""
        found: dict[str, list[int]] = {}
        for entry in self._open.values():
            missing: set[int] = set()
            for index, chunk in enumerate(entry.chunks):
                if index in entry.done:
                    continue
                if chunk.owner != self._me:
                    missing.add(chunk.owner)
                else:
                    missing |= set(self.members) - set(entry.parts.get(index, {}))
            found[entry.key] = sorted(missing)
        return found

    def receive(self, sender: int, header: Header, payload: memoryview | None) -> None:
        """Takes in a peer's "part" or "sum"; what does not fit is refused and counted, never raised."""
        try:
            generation = int(header["g"])
            if generation > self.generation and len(self._early) < 4096:
                self._early.append((sender, header, payload))
                return
            if generation != self.generation or self.attempts.get(sender) != header.get("a"):
                return  # an older generation, or a worker that was replaced: normal, and of no use
            entry = self._entry(str(header["r"]), Fragment(*(int(v) for v in header["s"])), str(header["k"]))
            if entry is None:
                return
            index = int(header["c"])
            if not 0 <= index < len(entry.chunks):
                raise ProtocolError(f"chunk {index} of {len(entry.chunks)}")
            if header["t"] == "open":
                return
            if header["t"] == "part":
                self._take_part(entry, index, sender, header, payload)
            else:
                self._take_sum(entry, index, sender, header, payload)
        except (ProtocolError, KeyError, TypeError, ValueError):
            self.refused += 1

    def tick(self) -> None:
        """Completes what only waits for workers that miss the quorum's grace time."""
        if self._quorum >= 1.0:
            return
        now = self._clock()
        for entry in list(self._open.values()):
            for index, chunk in enumerate(entry.chunks):
                if chunk.owner == self._me and index not in entry.done:
                    since = entry.quorum_since.get(index)
                    if since is not None and now - since >= self._grace_s:
                        self._sum(entry, index)
            self._try_complete(entry)

    def completed(self) -> list[Completed]:
        """Rounds completed since the last call."""
        found, self._completed = self._completed, []
        return found

    # -- inside -----------------------------------------------------------------------------------------------------

    def _entry(self, key: str, fragment: Fragment, codec_name: str) -> _Round | None:
        if key in self._finished:
            return None
        entry = self._open.get(key)
        if entry is None:
            if not 0 <= fragment.start <= fragment.stop or len(self._open) > 64:
                raise ProtocolError(f"round {key} of {fragment}")
            lane = self._lane(key, codec_name)
            if lane.residual is not None and fragment.stop > lane.residual.numel():
                raise ProtocolError(f"round {key} of {fragment} goes past the model")
            chunks = cut(fragment, self.members, lane.codec.bits)
            entry = _Round(key, fragment, lane, chunks, self._clock())
            entry.mean = torch.zeros(fragment.size)
            self._open[key] = entry
        elif entry.fragment != fragment or entry.lane.codec.name != codec_name:
            raise ProtocolError(f"round {key} is of {entry.fragment} in {entry.lane.codec.name}")
        return entry

    def _header(self, kind: str, entry: _Round, index: int) -> Header:
        return {
            "t": kind,
            "g": self.generation,
            "a": self.attempts.get(self._me, 0),
            "r": entry.key,
            "s": list(entry.fragment),
            "k": entry.lane.codec.name,
            "c": index,
        }

    def _absolute(self, entry: _Round, index: int) -> slice:
        chunk = entry.chunks[index]
        return slice(entry.fragment.start + chunk.start, entry.fragment.start + chunk.stop)

    def _send_part(self, entry: _Round, index: int) -> None:
        chunk, lane = entry.chunks[index], entry.lane
        header = self._header("part", entry, index) | {"w": entry.weight}
        if chunk.first:
            header["n"] = entry.note
        packed: Tensor | None = None
        if entry.values is not None:
            piece = entry.values[chunk.start : chunk.stop]
            if lane.residual is None:
                packed = lane.codec.encode(piece)
            else:
                packed = lane.codec.encode_feedback(piece, lane.residual[self._absolute(entry, index)])
                entry.sent[index] = packed
            entry.size_bytes += packed.numel()
        self._send(chunk.owner, header, None if packed is None else packed.numpy().data)

    def _own_part(self, entry: _Round, index: int) -> None:
        """A worker's own slice never crosses the wire, so it is exact and leaves no residual."""
        chunk, lane = entry.chunks[index], entry.lane
        piece: Tensor | None = None
        if entry.values is not None:
            piece = entry.values[chunk.start : chunk.stop]
            if lane.residual is not None:
                residual = lane.residual[self._absolute(entry, index)]
                piece = piece + residual
                residual.zero_()
                entry.sent[index] = piece
        entry.parts.setdefault(index, {})[self._me] = (entry.weight, piece)
        entry.notes[self._me] = entry.note

    def _take_part(self, entry: _Round, index: int, sender: int, header: Header, payload: memoryview | None) -> None:
        chunk = entry.chunks[index]
        weight = float(header["w"])
        if chunk.owner != self._me or not 0.0 <= weight < float("inf"):
            raise ProtocolError(f"part {index} of {entry.key}")
        packed = _packed(payload, entry.lane.codec.size_bytes(chunk.stop - chunk.start)) if weight else None
        if index in entry.done:
            return  # it came after the quorum's grace time
        entry.parts.setdefault(index, {})[sender] = (weight, packed)
        if "n" in header:
            entry.notes[sender] = dict(header["n"])
        self._try_sum(entry, index)
        self._try_complete(entry)

    def _take_sum(self, entry: _Round, index: int, sender: int, header: Header, payload: memoryview | None) -> None:
        chunk, lane = entry.chunks[index], entry.lane
        if chunk.owner != sender:
            raise ProtocolError(f"sum {index} of {entry.key} from {sender}")
        size = chunk.stop - chunk.start
        counted = [int(i) for i in header["i"]]
        if not header.get("e"):
            packed = _packed(payload, lane.codec.size_bytes(size))
            assert entry.mean is not None
            lane.codec.decode(packed, size, out=entry.mean[chunk.start : chunk.stop])
        entry.done.add(index)
        if "n" in header:
            entry.notes.update({int(k): dict(v) for k, v in header["n"].items()})
        self._note_late(entry, index, counted)
        self._try_complete(entry)

    def _try_sum(self, entry: _Round, index: int) -> None:
        if index in entry.done:
            return
        have = len(entry.parts.get(index, {}))
        if have == len(self.members):
            self._sum(entry, index)
        elif have >= max(1, self._quorum * len(self.members)):
            entry.quorum_since.setdefault(index, self._clock())

    def _sum(self, entry: _Round, index: int) -> None:
        chunk, lane = entry.chunks[index], entry.lane
        parts = entry.parts.pop(index)
        size = chunk.stop - chunk.start
        total_weight = sum(weight for weight, _ in parts.values())
        header = self._header("sum", entry, index) | {"i": sorted(parts)}
        if chunk.first:
            header["n"] = {str(k): v for k, v in entry.notes.items() if k in parts}
        packed: Tensor | None = None
        if total_weight > 0:
            total = torch.zeros(size)
            for worker in sorted(parts):
                weight, piece = parts[worker]
                if piece is None:
                    continue
                if piece.dtype == torch.float32:
                    total.add_(piece, alpha=weight)
                else:
                    lane.codec.accumulate(piece, weight, total)
            total.div_(total_weight)
            assert entry.mean is not None
            target = entry.mean[chunk.start : chunk.stop]
            if lane.owner_residual is None:
                packed = lane.codec.encode(total)
            else:
                packed = lane.codec.encode_feedback(total, lane.owner_residual[self._absolute(entry, index)])
            lane.codec.decode(packed, size, out=target)
        else:
            header["e"] = True
        entry.done.add(index)
        payload = None if packed is None else packed.numpy().data
        for peer in self.members:
            if peer != self._me:
                self._send(peer, dict(header), payload)
                entry.size_bytes += 0 if packed is None else packed.numel()
        self._note_late(entry, index, list(parts))

    def _note_late(self, entry: _Round, index: int, counted: list[int]) -> None:
        entry.late |= set(self.members) - set(counted)
        if self._me in counted or not entry.lane.resend or entry.lane.residual is None:
            return
        sent = entry.sent.pop(index, None)
        if sent is not None:  # nothing is lost: what missed the round goes out with the next
            self._add_back(entry, index, sent)

    def _came_too_late(self, entry: _Round, index: int) -> None:
        """The chunk was summed by a quorum before this worker contributed: its values wait for the next round."""
        lane, chunk = entry.lane, entry.chunks[index]
        if lane.resend and lane.residual is not None and entry.values is not None:
            lane.residual[self._absolute(entry, index)].add_(entry.values[chunk.start : chunk.stop])

    def _add_back(self, entry: _Round, index: int, sent: Tensor) -> None:
        assert entry.lane.residual is not None
        residual = entry.lane.residual[self._absolute(entry, index)]
        if sent.dtype == torch.float32:
            residual.add_(sent)
        else:
            entry.lane.codec.accumulate(sent, 1.0, residual)

    def _take_back(self, entry: _Round) -> None:
        """Undoes what a given-up round put on the residuals, so that its values can be launched again."""
        if entry.lane.residual is None or entry.values is None:
            return
        for index, sent in entry.sent.items():
            chunk = entry.chunks[index]
            self._add_back(entry, index, sent)
            entry.lane.residual[self._absolute(entry, index)].sub_(entry.values[chunk.start : chunk.stop])

    def _try_complete(self, entry: _Round) -> None:
        if not entry.launched or len(entry.done) < len(entry.chunks) or entry.key not in self._open:
            return
        del self._open[entry.key]
        self._finished = [*self._finished[-127:], entry.key]
        assert entry.mean is not None
        self._completed.append(
            Completed(
                entry.key,
                entry.fragment,
                entry.mean,
                entry.notes,
                self._clock() - entry.started,
                entry.size_bytes,
                len(self.members),
                tuple(sorted(entry.late)),
            )
        )


def _packed(payload: memoryview | None, size_bytes: int) -> Tensor:
    if payload is None or payload.nbytes != size_bytes:
        raise ProtocolError(f"{0 if payload is None else payload.nbytes} bytes where {size_bytes} belong")
    return torch.frombuffer(payload, dtype=torch.uint8)


def codec_lane(name: str) -> Lane:
    """A lane with no feedback, for rounds that happen once."""
    return Lane(codec(name))
