"""Rounds of a mesh: scatter slices to their owners, sum there, gather the sums.

A round's fragment is cut into one slice per worker, each slice into chunks, so that a chunk's sum travels back while
the next is still coming::

    worker i                      owner of chunk c                          every worker
    part(key, c, Q(dᵢ), wᵢ)  ─▶   Δ = Σ wᵢ deq(qᵢ) / Σ wᵢ   sum(key, c, Q'(Δ))  ─▶   mean[c] = deq(Q'(Δ))

With a lossy codec both Q carry error feedback: the worker's for what it sends, the owner's for what it sums. Sums are
taken in the order of the workers' numbers, so that every run of the same rounds gives the same bits, and the owner uses
its own packed sum, so that all workers hold the same mean.

Notes travel with sums, and only with sums: what a round's notes are is the same at all workers, whatever the order of
messages and whichever workers a sum is without. A worker's note goes with the sum of its own slice, so that every
worker hears it once. A worker may have no sum for its note: it owns no chunk, or its chunk was summed before it
contributed. It then gives the note to other owners beside its parts, and they pass it on: the first owner alone, or all
of them where a quorum may sum a chunk without some workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.exchange.notes import as_note
from thinwire.exchange.round import BY_DESIGN, KNOWN, MOST_WEIGHT, Chunk, Lane, Round, cut
from thinwire.exchange.rounds import OfRound
from thinwire.parameters import Fragment
from thinwire.protocol.clock import Clock
from thinwire.protocol.forms import Body
from thinwire.protocol.identifiers import train_number
from thinwire.protocol.messages import Open, Part, Sum

Send = Callable[[int, Body, "memoryview | None"], None]
TellNotFinite = Callable[[int, str, str, int], None]
"""Tells that values of a worker are not finite: in which round, of what, how many."""


class SliceSumming:
    """Each worker sums a slice of every fragment; see `thinwire.exchange.rounds.Summing`."""

    def __init__(
        self,
        me: int,
        send: Send,
        *,
        quorum: float = 1.0,
        grace_s: float = 0.0,
        clock: Clock = time.monotonic,
        tell: TellNotFinite = lambda worker, key, what, values: None,
    ) -> None:
        self._me, self._send, self._tell = me, send, tell
        self._quorum, self._grace_s, self._clock = quorum, grace_s, clock
        self.polls = True

    def cut(self, fragment: Fragment, members: tuple[int, ...], lane: Lane) -> tuple[Chunk, ...]:
        return cut(fragment, members, lane.codec.bits)

    def heeds(self, sender: int, body: OfRound, attempts: Mapping[int, int]) -> bool:
        assert isinstance(body, Open | Part | Sum)
        return attempts.get(sender) == body.attempt

    def launch(self, round: Round) -> None:
        """Sends what this worker contributes to the owners of its chunks, and sums what it owns itself."""
        owners, told = {chunk.owner for chunk in round.chunks}, self._told_beside_parts(round)
        for peer in round.members:  # an owner of nothing would not hear of the round otherwise
            if peer != self._me and peer not in owners:
                self._send(peer, Open(**round.stamp(0)), None)
        for index, chunk in enumerate(round.chunks):
            if index in round.done:
                round.missed(index)
            elif chunk.owner != self._me:
                self._send_part(round, index, with_note=index in told)
        for index, chunk in enumerate(round.chunks):
            if index not in round.done and chunk.owner == self._me:
                round.parts.setdefault(index, {})[self._me] = (round.weight, round.own(index))
                if chunk.first:
                    round.to_pass_on[self._me] = round.note
                self._try_sum(round, index)

    def take(self, round: Round, sender: int, body: OfRound, payload: memoryview | None) -> None:
        assert isinstance(body, Open | Part | Sum)
        if body.chunk >= len(round.chunks):
            raise ValueError(f"chunk {body.chunk} of {len(round.chunks)}")
        if isinstance(body, Part):
            self._take_part(round, sender, body, payload)
        elif isinstance(body, Sum):
            self._take_sum(round, sender, body, payload)

    def tick(self, round: Round) -> None:
        for index, since in list(round.quorum_since.items()):
            if index not in round.done and self._clock() - since >= self._grace_s:
                self._sum(round, index)

    def missing(self, round: Round, *, launched: bool) -> set[int]:
        missing: set[int] = set()
        for index, chunk in enumerate(round.chunks):
            if index in round.done:
                continue
            if chunk.owner != self._me:
                missing.add(chunk.owner)
            else:
                missing |= set(round.members) - set(round.parts.get(index, {}))
        return missing

    def forget(self, key: str) -> None:
        return

    def _told_beside_parts(self, round: Round) -> set[int]:
        """The chunks whose owners are to pass on this worker's note; none where it goes with this worker's own sum."""
        firsts = [index for index, chunk in enumerate(round.chunks) if chunk.first]
        if any(round.chunks[index].owner == self._me and index not in round.done for index in firsts):
            return set()
        return set(firsts if self._has_quorum(round) else firsts[:1])

    def _has_quorum(self, round: Round) -> bool:
        """Whether chunks of a round may be summed without some workers."""
        return self._quorum < 1.0 and train_number(round.key) is not None

    def _send_part(self, round: Round, index: int, *, with_note: bool) -> None:
        note = round.note if with_note else None
        part = Part(**round.stamp(index), weight=round.weight, note=note)
        packed = round.pack(index)
        round.size_bytes += 0 if packed is None else packed.numel()
        self._send(round.chunks[index].owner, part, _payload(packed))

    def _take_part(self, round: Round, sender: int, part: Part, payload: memoryview | None) -> None:
        index, weight = part.chunk, part.weight
        known = weight == KNOWN and train_number(round.key) is None
        if round.chunks[index].owner != self._me or not (known or 0.0 <= weight <= MOST_WEIGHT):
            raise ValueError(f"part {index} of {round.key}")
        packed = _packed(payload, round.lane.codec.size_bytes(round.size(index))) if weight else None
        note = None if part.note is None else as_note(part.note)
        if index in round.done:
            return  # it came after the quorum's grace time
        round.parts.setdefault(index, {})[sender] = (weight, packed)
        if note is not None:
            round.to_pass_on[sender] = note
        self._try_sum(round, index)

    def _take_sum(self, round: Round, sender: int, sum: Sum, payload: memoryview | None) -> None:
        index = sum.chunk
        if round.chunks[index].owner != sender or index in round.done:
            raise ValueError(f"sum {index} of {round.key} from {sender}")
        size = round.size(index)
        notes = {worker: as_note(note) for worker, note in (sum.notes or {}).items()}
        mean = round.piece(round.mean, index)  # not zeroed before: touching all of it would hold up the first send
        if sum.empty:
            mean.zero_()
            round.empty.add(index)
        else:
            packed = _packed(payload, round.lane.codec.size_bytes(size))
            if round.key.partition(":")[0] not in BY_DESIGN and not round.lane.codec.is_finite(packed, size):
                self._tell(sender, round.key, "mean", 0)
                raise ValueError(f"sum {index} of {round.key} from {sender} is not finite")
            round.lane.codec.decode(packed, size, out=mean)
        round.done.add(index)
        round.dropped |= set(sum.dropped)
        round.notes.update(notes)
        self._note_late(round, index, set(sum.counted))

    def _try_sum(self, round: Round, index: int) -> None:
        have = len(round.parts.get(index, {}))
        if index in round.done:
            return
        if have == len(round.members):
            self._sum(round, index)
        elif self._has_quorum(round) and have >= self._quorum * len(round.members):
            round.quorum_since.setdefault(index, self._clock())

    def _sum(self, round: Round, index: int) -> None:
        parts = round.parts.pop(index)
        notes = None
        if round.chunks[index].first:
            notes = {worker: note for worker, note in round.to_pass_on.items() if worker in parts}
            round.notes.update(notes)
        packed = round.sum(index, parts)
        if round.flaws:
            round.dropped |= set(round.flaws)
            for worker, values in sorted(round.flaws.items()):
                self._tell(worker, round.key, "contribution", values)
        if packed is None:
            round.piece(round.mean, index).zero_()
            round.empty.add(index)
        round.done.add(index)
        sum = Sum(
            **round.stamp(index),
            counted=sorted(parts),
            notes=notes,
            dropped=tuple(sorted(round.flaws)),
            empty=packed is None,
        )
        for peer in round.members:
            if peer != self._me:
                self._send(peer, sum, _payload(packed))
                round.size_bytes += 0 if packed is None else packed.numel()
        self._note_late(round, index, set(parts))

    def _note_late(self, round: Round, index: int, counted: set[int]) -> None:
        round.late |= set(round.members) - counted
        if self._me not in counted:
            round.missed(index)


def _payload(packed: Tensor | None) -> memoryview | None:
    return None if packed is None else packed.numpy().data


def _packed(payload: memoryview | None, size_bytes: int) -> Tensor:
    if payload is None or payload.nbytes != size_bytes:
        raise ValueError(f"{0 if payload is None else payload.nbytes} bytes where {size_bytes} belong")
    return torch.frombuffer(payload, dtype=torch.uint8)
