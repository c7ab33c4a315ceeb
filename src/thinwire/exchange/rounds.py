"""The mesh's rounds: scatter slices to their owners, sum there, gather the sums. No sockets in here.

A round has a key ("train:12"), a fragment and a codec. Its fragment is cut into one slice per worker, each slice into
chunks, so that a chunk's sum travels back while the next is still coming::

    worker i                      owner of chunk c                          every worker
    part(key, c, Q(dᵢ), wᵢ)  ─▶   Δ = Σ wᵢ deq(qᵢ) / Σ wᵢ   sum(key, c, Q'(Δ))  ─▶   mean[c] = deq(Q'(Δ))

With a lossy codec both Q carry error feedback: the worker's for what it sends, the owner's for what it sums. Sums are
taken in the order of the workers' numbers, so that every run of the same rounds gives the same bits, and the owner uses
its own packed sum, so that all workers hold the same mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from thinwire import logs
from thinwire.errors import ThinwireError
from thinwire.exchange.notes import is_note
from thinwire.exchange.round import BY_DESIGN, KNOWN, Chunk, Completed, Lane, Launch, Round, cut
from thinwire.parameters import Fragment
from thinwire.protocol.clock import Clock
from thinwire.protocol.forms import Body
from thinwire.protocol.identifiers import train_number
from thinwire.protocol.messages import Open, Part, Sum

_log = logging.getLogger("thinwire.exchange")

__all__ = ["KNOWN", "Chunk", "Completed", "Lane", "Launch", "Rounds", "cut"]

MOST_OPEN = 64
"""Rounds that others may open here before this worker has launched any of them."""
MOST_EARLY = 4096
MOST_WEIGHT = 1e30

Send = Callable[[int, Body, "memoryview | None"], None]
Tell = Callable[[int, str, str, int], None]
"""Tells that values of a worker are not finite: in which round, of what, how many."""


class OfChunk(TypedDict):
    """What all messages of a chunk say."""

    generation: int
    attempt: int
    round: str
    span: tuple[int, int]
    codec: str
    chunk: int


class _RefusedError(Exception):
    """A message that is not what it must be."""


_STRANGE = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
_REFUSED = (_RefusedError, ThinwireError, *_STRANGE)


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
        longest: int = 1 << 34,
        clock: Clock = time.monotonic,
        tell: Tell = lambda worker, key, what, values: None,
    ) -> None:
        self._tell = tell
        self._me, self._send, self._lane = me, send, lane
        self._quorum, self._grace_s, self._longest, self._clock = quorum, grace_s, longest, clock
        self._open: dict[str, Round] = {}
        self._settled: list[str] = []
        self._completed: list[Completed] = []
        self._early: list[tuple[int, Any, memoryview | None]] = []
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.attempts: dict[int, int] = {}
        self.refused = 0
        """Messages that were not what they must be."""

    def configure(
        self, generation: int, attempts: dict[int, int], landed: Callable[[str], bool] = lambda key: False
    ) -> list[Launch]:
        """Starts a generation of these workers; returns the rounds given up, to be launched again.

        Rounds that `landed` elsewhere are over: what was contributed to them has arrived.
        """
        pending = [r for r in self._open.values() if not landed(r.key)]
        for entry in reversed(pending):  # of two rounds of one fragment the later sum is undone first
            entry.take_back()
        given_up = [r for r in pending if r.launched]
        self._open, self._settled, self._completed = {}, [], []
        self.generation, self.attempts = generation, dict(attempts)
        logs.note(generation=generation)
        _log.info("generation %s has formed, of workers %s", generation, sorted(attempts))
        self.members = tuple(sorted(attempts))
        early, self._early = self._early, []
        for sender, body, payload in early:
            self.receive(sender, body, payload)
        return [Launch(r.key, r.fragment, r.lane.codec.name, r.values, r.weight, r.note) for r in given_up]

    def launch(self, own: Launch) -> bool:
        """Contributes to a round; with no values this worker only sums and listens. False if it already has."""
        if own.key in self._settled:
            return False
        entry = self._open.get(own.key)
        if entry is not None and entry.launched:
            return False
        if entry is None or (entry.fragment, entry.lane.codec.name) != (own.fragment, own.codec):
            self.refused += entry is not None  # others opened it as something else than it is
            entry = self._add(own.key, own.fragment, own.codec)
        entry.launched, entry.note = True, own.note
        entry.values = own.values if own.weight > 0 or own.weight == KNOWN else None
        entry.weight = own.weight if own.values is not None else 0.0
        entry.started = self._clock()
        self._scatter(entry)
        self._try_complete(entry)
        return True

    def _scatter(self, entry: Round) -> None:
        """Sends what this worker contributes to the owners of its chunks, and sums what it owns itself."""
        owners = {chunk.owner for chunk in entry.chunks}
        for peer in self.members:  # who owns nothing of it would not hear of the round otherwise
            if peer != self._me and peer not in owners:
                self._send(peer, Open(**self._stamp(entry, 0)), None)
        for index, chunk in enumerate(entry.chunks):
            if index in entry.done:
                entry.missed(index)
            elif chunk.owner != self._me:
                self._send_part(entry, index)
        for index, chunk in enumerate(entry.chunks):
            if index not in entry.done and chunk.owner == self._me:
                entry.parts.setdefault(index, {})[self._me] = (entry.weight, entry.own(index))
                if chunk.first:
                    entry.notes[self._me] = entry.note
                self._try_sum(entry, index)

    def wanted(self) -> list[tuple[str, Fragment, str]]:
        """Rounds that others have launched and this worker has not."""
        return [(r.key, r.fragment, r.lane.codec.name) for r in self._open.values() if not r.launched]

    @property
    def waiting(self) -> bool:
        """Whether any round is open."""
        return bool(self._open)

    def waiting_for(self) -> dict[str, list[int]]:
        """Open rounds, and the workers each still misses something from."""
        found: dict[str, list[int]] = {}
        for entry in self._open.values():
            if entry.complete:
                continue
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

    def receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        """Takes in a peer's message; what does not fit is refused and counted, never raised."""
        try:
            self._receive(sender, body, payload)
        except _REFUSED:
            self.refused += 1

    def tick(self) -> None:
        """Completes what only waits for workers that miss the quorum's grace time."""
        if self._quorum >= 1.0:
            return
        now = self._clock()
        for entry in list(self._open.values()):
            for index, since in list(entry.quorum_since.items()):
                if index not in entry.done and now - since >= self._grace_s:
                    self._sum(entry, index)
            self._try_complete(entry)

    def completed(self) -> list[Completed]:
        """Rounds completed since the last call; each is given up with a generation until it is settled."""
        found, self._completed = self._completed, []
        return found

    def settle(self, key: str) -> None:
        """A completed round has been taken up: nothing of it needs to be kept."""
        if self._open.pop(key, None) is not None:
            self._settled = [*self._settled[-127:], key]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _receive(self, sender: int, body: Open | Part | Sum, payload: memoryview | None) -> None:
        if body.generation > self.generation:
            if len(self._early) >= MOST_EARLY:
                raise _RefusedError("too many messages of a generation not heard of")
            self._early.append((sender, body, payload))
            return
        if body.generation != self.generation or self.attempts.get(sender) != body.attempt:
            return  # an older generation, or a worker that was replaced: normal, and of no use
        key, (start, stop) = body.round, body.span
        if key in self._settled:
            return
        entry = self._open.get(key)
        if entry is None:
            if not 0 <= start < stop <= self._longest or len(self.wanted()) >= MOST_OPEN:
                raise _RefusedError(f"round {key} of {start} to {stop}")
            entry = self._add(key, Fragment(start, stop), body.codec)
        elif entry.fragment != (start, stop) or entry.lane.codec.name != body.codec:
            raise _RefusedError(f"round {key} is of {entry.fragment} in {entry.lane.codec.name}")
        if body.chunk >= len(entry.chunks):
            raise _RefusedError(f"chunk {body.chunk} of {len(entry.chunks)}")
        if isinstance(body, Part):
            self._take_part(entry, sender, body, payload)
        elif isinstance(body, Sum):
            self._take_sum(entry, sender, body, payload)

    def _add(self, key: str, fragment: Fragment, codec_name: str) -> Round:
        lane = self._lane(key, codec_name)
        if lane.residual is not None and fragment.stop > lane.residual.numel():
            raise _RefusedError(f"round {key} of {fragment} goes past the model")
        entry = Round(key, fragment, lane, self._cut(fragment, lane), self._clock(), torch.empty(fragment.size))
        self._open[key] = entry
        return entry

    def _cut(self, fragment: Fragment, lane: Lane) -> tuple[Chunk, ...]:
        return cut(fragment, self.members, lane.codec.bits)

    def _stamp(self, entry: Round, index: int) -> OfChunk:
        """What all messages of a chunk say."""
        return {
            "generation": self.generation,
            "attempt": self.attempts.get(self._me, 0),
            "round": entry.key,
            "span": (entry.fragment.start, entry.fragment.stop),
            "codec": entry.lane.codec.name,
            "chunk": index,
        }

    def _send_part(self, entry: Round, index: int) -> None:
        note = entry.note if entry.chunks[index].first else None
        part = Part(**self._stamp(entry, index), weight=entry.weight, note=note)
        packed = entry.pack(index)
        entry.size_bytes += 0 if packed is None else packed.numel()
        self._send(entry.chunks[index].owner, part, _payload(packed))

    def _take_part(self, entry: Round, sender: int, part: Part, payload: memoryview | None) -> None:
        index, weight = part.chunk, part.weight
        known = weight == KNOWN and train_number(entry.key) is None
        if entry.chunks[index].owner != self._me or not (known or 0.0 <= weight <= MOST_WEIGHT):
            raise _RefusedError(f"part {index} of {entry.key}")
        packed = _packed(payload, entry.lane.codec.size_bytes(entry.size(index))) if weight else None
        note = None if part.note is None else _note(part.note)
        if index in entry.done:
            return  # it came after the quorum's grace time
        entry.parts.setdefault(index, {})[sender] = (weight, packed)
        if note is not None:
            entry.notes[sender] = note
        self._try_sum(entry, index)
        self._try_complete(entry)

    def _take_sum(self, entry: Round, sender: int, sum: Sum, payload: memoryview | None) -> None:
        index = sum.chunk
        if entry.chunks[index].owner != sender or index in entry.done:
            raise _RefusedError(f"sum {index} of {entry.key} from {sender}")
        size = entry.size(index)
        notes = {worker: _note(note) for worker, note in (sum.notes or {}).items()}
        mean = entry.piece(entry.mean, index)  # not zeroed before: touching all of it would hold up the first send
        if sum.empty:
            mean.zero_()
            entry.empty.add(index)
        else:
            packed = _packed(payload, entry.lane.codec.size_bytes(size))
            if entry.key.partition(":")[0] not in BY_DESIGN and not entry.lane.codec.is_finite(packed, size):
                self._tell(sender, entry.key, "mean", 0)
                raise _RefusedError(f"sum {index} of {entry.key} from {sender} is not finite")
            entry.lane.codec.decode(packed, size, out=mean)
        entry.done.add(index)
        entry.dropped |= set(sum.dropped)
        entry.notes.update(notes)
        self._note_late(entry, index, set(sum.counted))
        self._try_complete(entry)

    def _try_sum(self, entry: Round, index: int) -> None:
        have = len(entry.parts.get(index, {}))
        if index in entry.done:
            return
        if have == len(self.members):
            self._sum(entry, index)
        elif train_number(entry.key) is not None and have >= max(1, self._quorum * len(self.members)):
            entry.quorum_since.setdefault(index, self._clock())

    def _sum(self, entry: Round, index: int) -> None:
        parts = entry.parts.pop(index)
        notes = self._notes_to_pass_on(entry, index, set(parts))
        packed = entry.sum(index, parts)
        if entry.flaws:
            entry.dropped |= set(entry.flaws)
            for worker, values in sorted(entry.flaws.items()):
                self._tell(worker, entry.key, "contribution", values)
        if packed is None:
            entry.piece(entry.mean, index).zero_()
            entry.empty.add(index)
        entry.done.add(index)
        sum = Sum(
            **self._stamp(entry, index),
            counted=sorted(parts),
            notes=notes if entry.chunks[index].first else None,
            dropped=tuple(sorted(entry.flaws)),
            empty=packed is None,
        )
        for peer in self.members:
            if peer != self._me:
                self._send(peer, sum, _payload(packed))
                entry.size_bytes += 0 if packed is None else packed.numel()
        self._note_late(entry, index, set(parts))

    def _notes_to_pass_on(self, entry: Round, index: int, counted: set[int]) -> dict[int, dict[str, Any]]:
        """The notes that go with a chunk's sum.

        Each owner passes on its own note, and the owner of the round's first chunk those of workers that own no chunk:
        every worker hears each note once, where it would hear it from each owner otherwise. An owner that sums without
        some workers passes on all that it has, since those workers may have missed their own chunks too.
        """
        heard = {worker: note for worker, note in entry.notes.items() if worker in counted}
        if len(counted) < len(self.members):
            return heard
        owners = {chunk.owner for chunk in entry.chunks}
        return {w: note for w, note in heard.items() if w == self._me or (index == 0 and w not in owners)}

    def _note_late(self, entry: Round, index: int, counted: set[int]) -> None:
        entry.late |= set(self.members) - counted
        if self._me not in counted and entry.launched:
            entry.missed(index)

    def _try_complete(self, entry: Round) -> None:
        if not entry.launched or entry.complete or len(entry.done) < len(entry.chunks):
            return
        entry.complete = True
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
                tuple(sorted(entry.dropped)),
                len(entry.empty) == len(entry.chunks),
            )
        )


def _payload(packed: Tensor | None) -> memoryview | None:
    return None if packed is None else packed.numpy().data


def _packed(payload: memoryview | None, size_bytes: int) -> Tensor:
    if payload is None or payload.nbytes != size_bytes:
        raise _RefusedError(f"{0 if payload is None else payload.nbytes} bytes where {size_bytes} belong")
    return torch.frombuffer(payload, dtype=torch.uint8)


def _note(value: Any) -> dict[str, Any]:
    if not is_note(value):
        raise _RefusedError("a note is a table of what workers say with rounds")
    return dict(value)
