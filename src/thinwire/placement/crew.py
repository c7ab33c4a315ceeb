"""The workers of one group, as torch.distributed has them: they move tensors together, or not at all.

One primitive carries everything: each member hands a piece to each other, and gets one from each. A gather hands the
same piece to all, a sum adds up what came. All links are busy in both directions at once, and pieces come where they
are to lie; gloo's own gather and reduce take several times as long (decision 0011).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, ProcessGroupGloo, TCPStore

from thinwire.engine.signals import GroupBrokenError

SIOCGIFADDR = 0x8915
RENDEZVOUS_S = 60.0
LEAVE_S = 1.0
SIGNS = ("gloo", "onnection", "imed out", "peer")
"""What messages of a broken transport say."""


class Pending:
    """Pieces on their way."""

    def __init__(self, crew: Crew, works: list[Any], held: Any, came: list[Tensor]) -> None:
        self._crew, self._works, self._held, self._came = crew, works, held, came

    @property
    def done(self) -> bool:
        """Whether they have come, or never will; of numbers that are told only."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> list[Tensor]:
        """One piece from each member, this one's own among them."""
        works, self._works = self._works, []
        with self._crew.together():
            for work in works:
                work.wait()
        self._held = None
        return self._came


class Crew:
    """One member's end. Before `form` it is alone: a group of one needs nobody."""

    def __init__(self, part: int, size: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.part, self.size = part, size
        self._host, self._port = host, port
        self.rows: list[int] = [1] * size
        """Of every member, in the pass that is under way."""
        self.sent_bytes = 0
        self.formed: str | None = None
        """The name under which the members last met."""
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._tag = 0
        self._listener: socket.socket | None = None

    @property
    def address(self) -> str:
        """Where members meet, if this one's is the place: that of part 0 is."""
        if self._listener is None:
            self._listener = socket.create_server((self._host, self._port))
            port = self._listener.getsockname()[1]
            self._store = TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
                timeout=timedelta(seconds=RENDEZVOUS_S),
            )
            self._address = f"{self._host}:{port}"
        return self._address

    def form(self, address: str, name: str, timeout_s: float) -> None:
        """Meets the other members at an address, under a name that no other meeting has."""
        self.disband()
        self._tag = 0
        self._patience = timedelta(seconds=timeout_s)
        if self.size > 1:
            host, _, port = address.rpartition(":")
            interface = interface_of(self._host)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            with self.together():
                store = self._store
                if self.part or store is None:
                    patience = timedelta(seconds=min(RENDEZVOUS_S, timeout_s))
                    store = TCPStore(host, int(port), is_master=False, timeout=patience)
                self._meeting = PrefixStore(name, store)
                own = PrefixStore("crew", self._meeting)
                self._group = ProcessGroupGloo(own, self.part, self.size, self._patience)
        self.formed = name

    def enter_world(self) -> None:
        """Makes the members torch.distributed's own world, for what knows no other."""
        with self.together(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = PrefixStore("world", self._meeting)
            dist.init_process_group("gloo", store=own, rank=self.part, world_size=self.size, timeout=self._patience)

    def disband(self) -> None:
        """Lets go of the other members; what is still on its way may hold that up, and holds up nobody else."""
        self.formed = None
        left, self._group = [self._group], None
        leaving = threading.Thread(target=left.clear, name="disband", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    @contextlib.contextmanager
    def together(self, *, among_others: bool = False) -> Iterator[None]:
        """What the others' absence raises becomes an error of its own; among others, if it can be told from them."""
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
        """Gives piece i to member i, and gets one of shape i from it, in the memory that is given for it."""
        return self.start(pieces, shapes, into).wait()

    def start(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> Pending:
        """`hand`, under way."""
        device, dtype = pieces[0].device, pieces[0].dtype
        given = [piece.detach().cpu().contiguous() for piece in pieces]
        direct = into is not None and device.type == "cpu"
        came = list(into) if into is not None and direct else [torch.empty(tuple(s), dtype=dtype) for s in shapes]
        if direct:
            came[self.part].copy_(given[self.part])
        else:
            came[self.part] = given[self.part]
        group, works = self._met(), []
        self._tag += 1
        for apart in range(1, self.size):
            before, after = (self.part - apart) % self.size, (self.part + apart) % self.size
            with self.together():
                if came[before].numel():
                    works.append(group.recv([came[before]], before, self._tag))
                if given[after].numel():
                    works.append(group.send([given[after]], after, self._tag))
            self.sent_bytes += given[after].numel() * given[after].element_size()
        pending = Pending(self, works, given, came)
        if device.type == "cpu":
            return pending
        found = [piece.to(device) for piece in pending.wait()]
        for lies, piece in zip(into or (), found, strict=False):
            lies.copy_(piece)
        return Pending(self, [], None, found)

    def telling(self, values: Sequence[float]) -> Pending:
        """`tell`, under way."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return Pending(self, [], None, [mine])
        sent, came = mine.repeat(self.size), torch.empty(len(mine) * self.size, dtype=torch.float64)
        sizes = [len(mine)] * self.size
        self.sent_bytes += (self.size - 1) * mine.numel() * mine.element_size()
        with self.together():
            work = self._met().alltoall_base(came, sent, sizes, sizes, AllToAllOptions())
        return Pending(self, [work], sent, list(came.view(self.size, -1)))

    def tell(self, values: Sequence[float]) -> list[list[float]]:
        """What every member says, numbers for numbers."""
        return [piece.tolist() for piece in self.telling(values).wait()]

    def _met(self) -> Any:
        if self._group is None and self.size > 1:
            raise GroupBrokenError("the workers of its group have not met")
        return self._group


def interface_of(host: str) -> str | None:
    """The network interface that has an address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def bounds(units: int, size: int, grain: int = 1) -> list[int]:
    """Where the shares of `size` members begin and end among so many units of `grain` numbers each.

    >>> bounds(10, 4), bounds(3, 2, grain=5)
    ([0, 2, 5, 7, 10], [0, 5, 15])
    """
    return [part * units // size * grain for part in range(size + 1)]
