"""Groups in virtual time: members transfer tensors over the simulated network, as processes do through gloo.

A connection between two members behaves like TCP: nothing is lost or repeated while both processes live, and a lossy
link only delays. The end of one process makes the others' waits fail, after a delay drawn from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.cluster.simulated.fault_injection import FaultInjection
from thinwire.cluster.simulated.fibers import Fiber, VirtualTime
from thinwire.cluster.simulated.network import Network
from thinwire.errors import ConfigError
from thinwire.placement import Crew

RESEND_S = 0.2
"""Seconds after which TCP sends a lost segment again."""
NOTICED_S = (0.0, 0.01, 0.2, 1.0)
"""Delays after which a member notices that another member's process has ended."""


class Owner(NamedTuple):
    """A worker's process."""

    worker: int
    attempt: int


class GroupTransport:
    """The meetings of all groups of one run."""

    def __init__(self, time: VirtualTime, network: Network, message_faults: FaultInjection, seed: int) -> None:
        self.time, self.network, self.message_faults = time, network, message_faults
        self._chance = random.Random(f"{seed} meetings")
        self._held: dict[tuple[str, str], _Meeting] = {}
        self.dead: set[Owner] = set()

    def reset(self) -> None:
        """Removes the workers of an earlier launch, because the attempts of the next launch have the same numbers."""
        self._held.clear()
        self.dead.clear()

    def crew(self, worker: int, attempt: int, size: int, host: str) -> Crew:
        """A worker's end of its group."""
        return Crew(worker % size, size, carrier=_Carrier(self, Owner(worker, attempt), size))

    def at(self, address: str, name: str) -> _Meeting:
        """The meeting of that name at an address; created by the first call."""
        return self._held.setdefault((address, name), _Meeting(self))

    def kill(self, worker: int, attempt: int) -> None:
        """Notes that a process has ended; the other members of its group notice after a delay."""
        owner = Owner(worker, attempt)
        self.dead.add(owner)
        for meeting in self._held.values():
            for part, other in list(meeting.present.items()):
                if other == owner:
                    seen = self.time.now() + self._chance.choice(NOTICED_S)
                    self.time.at(seen, lambda meeting=meeting, part=part: meeting.lose(part))  # type: ignore[misc]


class _Meeting:
    """Members that are present, pieces that have arrived, and fibers that wait."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport, self._time = transport, transport.time
        self.present: dict[int, Owner] = {}
        self.gone: set[int] = set()
        self.arrived: dict[tuple[int, int, int], Tensor] = {}
        """By sender, receiver and tag."""
        self._waiting: list[Fiber] = []

    def come(self, part: int, owner: Owner) -> None:
        self.present[part] = owner
        self.wake()

    def lose(self, part: int) -> None:
        """Closes a member's connections."""
        self.gone.add(part)
        self.wake()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            self._time.wake(fiber)

    def wait(self, until: Callable[[], bool], others: set[int], deadline: float) -> None:
        """Waits for a condition; raises RuntimeError if one of `others` is gone, or after the deadline."""
        while not until():
            if others & self.gone:
                raise RuntimeError(f"connection closed by peer {min(others & self.gone)}")
            if self._time.now() >= deadline:
                raise RuntimeError("timed out waiting for a peer")
            self._waiting.append(self._time.current)
            self._time.park(None if deadline == math.inf else deadline - self._time.now())

    def post(self, key: tuple[int, int, int], piece: Tensor) -> None:
        """Sends a copy of a piece."""
        copy = piece.detach().clone()
        source, target = self.present[key[0]].worker, self.present[key[1]].worker

        def arrive() -> None:
            self.arrived[key] = copy
            self.wake()

        def leave() -> None:
            if not self._transport.message_faults.delays(source, target, self._time.now()):
                self._time.at(self._time.now() + RESEND_S, leave)
            elif key[1] not in self.gone:
                self._transport.network.send(source, target, copy.numel() * copy.element_size(), arrive)

        leave()


class _Carrier:
    """One member's end; see `thinwire.placement.crew.Carrier`."""

    def __init__(self, transport: GroupTransport, owner: Owner, size: int) -> None:
        self._transport, self._owner = transport, owner
        self._part, self._size = owner.worker % size, size
        self._meeting: _Meeting | None = None
        self._swaps = 0
        self._patience_s = math.inf

    @property
    def address(self) -> str:
        return f"meeting:{self._owner.worker}.{self._owner.attempt}"

    def meet(self, address: str, name: str, timeout_s: float) -> None:
        worker, _, attempt = address.partition(":")[2].partition(".")
        if Owner(int(worker), int(attempt)) in self._transport.dead:
            raise RuntimeError(f"connection refused: no peer at {address}")
        meeting = self._transport.at(address, name)
        self._meeting, self._patience_s, self._swaps = meeting, timeout_s, 0
        meeting.come(self._part, self._owner)
        deadline = self._transport.time.now() + timeout_s
        others = set(range(self._size)) - {self._part}
        meeting.wait(lambda: len(meeting.present) == self._size, others, deadline)

    def leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.lose(self._part)

    def send(self, piece: Tensor, to: int, tag: int) -> _Work:
        meeting = self._met()
        if to in meeting.gone:
            raise RuntimeError(f"connection closed by peer {to}")
        meeting.post((self._part, to, tag), piece)
        return _Work(self, meeting, {})

    def receive(self, into: Tensor, of: int, tag: int) -> _Work:
        return _Work(self, self._met(), {(of, self._part, tag): into})

    def swap(self, came: Tensor, given: Tensor) -> _Work:
        meeting = self._met()
        self._swaps += 1
        pieces, places = torch.chunk(given, self._size), torch.chunk(came, self._size)
        places[self._part].copy_(pieces[self._part])
        others = [part for part in range(self._size) if part != self._part]
        for part in others:
            meeting.post((self._part, part, -self._swaps), pieces[part])
        return _Work(self, meeting, {(part, self._part, -self._swaps): places[part] for part in others})

    def enter_world(self) -> None:
        raise ConfigError("a pipeline runs in processes; simulate tw.Planned or tw.TensorParallel in its place")

    def deadline(self) -> float:
        return self._transport.time.now() + self._patience_s

    def _met(self) -> _Meeting:
        if self._meeting is None:
            raise RuntimeError("the workers of its group have not met")
        return self._meeting


class _Work:
    """Pieces in transfer to one member, and their tensors; see `thinwire.placement.crew.Work`."""

    def __init__(self, carrier: _Carrier, meeting: _Meeting, wanted: dict[tuple[int, int, int], Tensor]) -> None:
        self._meeting, self._wanted, self._deadline = meeting, wanted, carrier.deadline()

    def is_completed(self) -> bool:
        failed = bool({of for of, _, _ in self._missing()} & self._meeting.gone)
        return failed or not self._missing()

    def wait(self) -> None:
        others = {of for of, _, _ in self._wanted}
        self._meeting.wait(lambda: not self._missing(), others, self._deadline)
        wanted, self._wanted = self._wanted, {}
        for key, into in wanted.items():
            into.copy_(self._meeting.arrived.pop(key).view(into.shape))

    def _missing(self) -> list[tuple[int, int, int]]:
        return [key for key in self._wanted if key not in self._meeting.arrived]
