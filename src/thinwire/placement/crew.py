"""The workers of one group, which transfer tensors collectively: all of them, or none.

A single primitive carries all transfers: each member gives one piece to every other member, and gets one from each (an
all-to-all). A gather gives the same piece to all; a reduction adds the received pieces. All links are busy in both
directions at once, and pieces are received in place. gloo's own gather and reduce take several times as long (decision
0011). A `Carrier` moves the bytes: gloo between processes, memory in virtual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchange.signals import GroupBrokenError
from thinwire.placement.gloo import Gloo

SIGNS = ("gloo", "onnection", "imed out", "peer")
"""Parts of the error messages of a broken transport."""


class Work(Protocol):
    """One transfer under way, with the methods of torch.distributed's Work."""

    def is_completed(self) -> bool:
        """Whether the transfer has ended or failed."""

    def wait(self) -> Any:
        """Waits for the end of the transfer; raises RuntimeError if it failed."""


class Carrier(Protocol):
    """Moves one member's tensors to the other members. Every method raises RuntimeError if another member is gone."""

    @property
    def address(self) -> str:
        """The address where members meet, which is that of part 0."""

    def meet(self, address: str, name: str, timeout_s: float) -> None:
        """Meets the other members at an address, under a name that is unique to this meeting."""

    def leave(self) -> None:
        """Leaves the group; the transfers of other members with this one fail."""

    def send(self, piece: Tensor, to: int, tag: int) -> Work: ...

    def receive(self, into: Tensor, of: int, tag: int) -> Work: ...

    def swap(self, came: Tensor, given: Tensor) -> Work:
        """Sends the i-th of equal pieces to member i, and receives one piece from each."""

    def enter_world(self) -> None:
        """Makes the members torch.distributed's default process group, for code that requires one."""


class Pending:
    """Pieces that are being transferred."""

    def __init__(self, crew: Crew, works: Sequence[Work], held: Any, came: list[Tensor]) -> None:
        self._crew, self._works, self._held, self._came = crew, works, held, came

    @property
    def done(self) -> bool:
        """Whether the transfer has ended or failed; only for transfers of `telling`."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> list[Tensor]:
        """One piece from each member, including this one's own."""
        works, self._works = self._works, ()
        with self._crew.together():
            for work in works:
                work.wait()
        self._held = None
        return self._came


class Crew:
    """One member's end of its group. A group of one needs no transfers; larger groups need `form` first."""

    def __init__(
        self, part: int, size: int, host: str = "127.0.0.1", port: int = 0, *, carrier: Carrier | None = None
    ) -> None:
        self.part, self.size = part, size
        self._carrier: Carrier = Gloo(part, size, host, port) if carrier is None else carrier
        self.rows: list[int] = [1] * size
        """Rows of every member in the present pass."""
        self.sent_bytes = self.sent_messages = 0
        self.formed: str | None = None
        """The name of the last meeting, while the members are connected."""
        self._tag = 0

    @property
    def address(self) -> str:
        """The address where members meet, which is that of part 0."""
        return self._carrier.address

    def form(self, address: str, name: str, timeout_s: float) -> None:
        """Meets the other members at an address, under a name that is unique to this meeting."""
        self.disband()
        self._tag = 0
        if self.size > 1:
            with self.together():
                self._carrier.meet(address, name, timeout_s)
        self.formed = name

    def enter_world(self) -> None:
        """Makes the members torch.distributed's default process group, for code that requires one."""
        with self.together():
            self._carrier.enter_world()

    def disband(self) -> None:
        """Disconnects from the other members."""
        self.formed = None
        self._carrier.leave()

    def close(self) -> None:
        """Disconnects from the other members for good."""
        self.disband()
        close = getattr(self._carrier, "close", None)
        if close is not None:
            close()

    @contextlib.contextmanager
    def together(self, *, among_others: bool = False) -> Iterator[None]:
        """Raises GroupBrokenError for errors of the transport. `among_others`: other errors of the block pass."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            chain = f"{error} {error.__cause__} {error.__context__}"
            if among_others and not any(sign in chain for sign in SIGNS):
                raise
            raise GroupBrokenError(f"the workers of its group were lost: {error}") from error

    # -- moving -----------------------------------------------------------------------------------------------------

    def hand(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Gives piece i to member i, and gets a piece of shape i from it, stored in `into` if given."""
        return self.start(pieces, shapes, into).wait()

    def start(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> Pending:
        """Begins `hand` and returns the pending pieces."""
        device, dtype = pieces[0].device, pieces[0].dtype
        given = [piece.detach().cpu().contiguous() for piece in pieces]
        direct = into is not None and device.type == "cpu"
        came = list(into) if into is not None and direct else [torch.empty(tuple(s), dtype=dtype) for s in shapes]
        if direct:
            came[self.part].copy_(given[self.part])
        else:
            came[self.part] = given[self.part]
        works: list[Work] = []
        self._tag += 1
        for apart in range(1, self.size):
            before, after = (self.part - apart) % self.size, (self.part + apart) % self.size
            with self.together():
                if came[before].numel():
                    works.append(self._carrier.receive(came[before], before, self._tag))
                if given[after].numel():
                    works.append(self._carrier.send(given[after], after, self._tag))
                    self.sent_messages += 1
            self.sent_bytes += given[after].numel() * given[after].element_size()
        pending = Pending(self, works, given, came)
        if device.type == "cpu":
            return pending
        found = [piece.to(device) for piece in pending.wait()]
        for lies, piece in zip(into or (), found, strict=False):
            lies.copy_(piece)
        return Pending(self, [], None, found)

    def telling(self, values: Sequence[float]) -> Pending:
        """Begins `tell` and returns the pending pieces."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return Pending(self, [], None, [mine])
        sent, came = mine.repeat(self.size), torch.empty(len(mine) * self.size, dtype=torch.float64)
        self.sent_bytes += (self.size - 1) * mine.numel() * mine.element_size()
        self.sent_messages += self.size - 1
        with self.together():
            work = self._carrier.swap(came, sent)
        return Pending(self, [work], sent, list(came.view(self.size, -1)))

    def tell(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers that every member gives, by member."""
        return [piece.tolist() for piece in self.telling(values).wait()]


def bounds(units: int, size: int, grain: int = 1) -> list[int]:
    """Borders of the shares of `size` members in `units` units of `grain` numbers each.

    >>> bounds(10, 4), bounds(3, 2, grain=5)
    ([0, 2, 5, 7, 10], [0, 5, 15])
    """
    return [part * units // size * grain for part in range(size + 1)]
