"""A simulated network: K `Rounds` machines and a virtual clock; one message is delivered at a time, without threads."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.errors import ProtocolError
from thinwire.exchange.round import Completed, Lane, Launch, cut
from thinwire.exchange.rounds import Rounds
from thinwire.exchange.slices import SliceSumming
from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body, header_of
from thinwire.protocol.messages import AMONG_WORKERS, Sum
from thinwire.rules.compression import codec

Packet = tuple[dict[str, Any], "memoryview | None"]


class Mesh:
    """Machines joined by links that keep messages in order; the seed decides which link delivers next."""

    def __init__(
        self,
        workers: Iterable[int],
        seed: int = 0,
        *,
        size: int,
        quorum: float = 1.0,
        grace_s: float = 0.0,
        feedback: bool = True,
        resend: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.size, self.feedback, self.resend = size, feedback, resend
        self._quorum, self._grace_s = quorum, grace_s
        self.now = 0.0
        self.generation = 0
        self.machines: dict[int, Rounds] = {}
        self.residual: dict[int, Tensor] = {}
        self.owner_residual: dict[int, Tensor] = {}
        self.links: dict[tuple[int, int], deque[Packet]] = {}
        self.cut_links: set[tuple[int, int]] = set()
        """Links whose messages wait until the link is healed."""
        self.keeping: set[int] = set()
        """Workers that leave completed rounds unsettled, like a worker that waits for the joint state."""
        self.landed: dict[int, dict[str, Completed]] = {}
        self.counted: dict[str, dict[int, list[int]]] = {}
        """By key and chunk, the workers whose parts its owner last summed."""
        self.form(workers)

    # -- machines ---------------------------------------------------------------------------------------------------

    def form(self, workers: Iterable[int]) -> dict[int, list[Launch]]:
        """Begins a generation of these workers, as `Peer` does; returns the rounds that each must launch again."""
        attempts = dict.fromkeys(sorted(workers), 0)
        self.generation += 1
        for gone in set(self.machines) - set(attempts):
            self.machines.pop(gone)
            for link in [pair for pair in self.links if gone in pair]:
                self.links[link].clear()
        given_up = {}
        landed = {key for worker in attempts for key in self.landed.get(worker, ())}
        for worker in attempts:
            if worker not in self.machines:
                self._add(worker)
            machine = self.machines[worker]
            share = max(1, len(machine.members))
            given_up[worker] = machine.configure(self.generation, attempts, landed.__contains__)
            self.residual[worker].add_(self.owner_residual[worker], alpha=share)
            self.owner_residual[worker].zero_()
        return given_up

    def _add(self, worker: int) -> None:
        def send(peer: int, body: Body, payload: memoryview | None) -> None:
            if isinstance(body, Sum):
                self.counted.setdefault(body.round, {})[body.chunk] = list(body.counted)
            data = None if payload is None else memoryview(bytearray(payload))
            self.links.setdefault((worker, peer), deque()).append((json.loads(json.dumps(header_of(body))), data))

        def lane(key: str, name: str) -> Lane:
            chosen = codec(name)
            if not key.startswith("train:") or not self.feedback or not (chosen.lossy or self.resend):
                return Lane(chosen)
            return Lane(chosen, self.residual[worker], self.owner_residual[worker], self.resend)

        self.residual[worker] = torch.zeros(self.size)
        self.owner_residual[worker] = torch.zeros(self.size)
        self.landed.setdefault(worker, {})
        summing = SliceSumming(worker, send, quorum=self._quorum, grace_s=self._grace_s, clock=lambda: self.now)
        self.machines[worker] = Rounds(worker, summing, lane, clock=lambda: self.now)

    def launch(
        self,
        worker: int,
        key: str,
        values: Tensor | None,
        *,
        weight: float = 1.0,
        codec_name: str = "float32",
        fragment: Fragment | None = None,
        note: dict[str, Any] | None = None,
    ) -> None:
        fragment = fragment or Fragment(0, self.size)
        own = None if values is None else values.clone()  # a machine may overwrite the values
        assert self.machines[worker].launch(Launch(key, fragment, codec_name, own, weight, note or {}))
        self._collect(worker)

    def relaunch(self, worker: int, given_up: list[Launch]) -> None:
        """Launches the rounds again that a worker gave up for a new generation."""
        for launch in given_up:
            assert self.machines[worker].launch(launch)
        self._collect(worker)

    # -- the network ------------------------------------------------------------------------------------------------

    def deliver(self, link: tuple[int, int] | None = None) -> bool:
        """Delivers one message of the given link or of a random one; False if no message can be delivered."""
        ready = sorted(pair for pair, queue in self.links.items() if queue and pair not in self.cut_links)
        if link is None:
            if not ready:
                return False
            link = self.rng.choice(ready)
        sender, receiver = link
        header, payload = self.links[link].popleft()
        if receiver in self.machines:
            self.inject(sender, receiver, header, payload)
        return True

    def inject(self, sender: int, receiver: int, header: Any, payload: memoryview | None = None) -> None:
        """Passes a message to a machine, as a `Member` does; the message may be forged."""
        try:
            self.machines[receiver].receive(sender, AMONG_WORKERS.decode(header), payload)
        except ProtocolError:
            self.machines[receiver].refused += 1
        self._collect(receiver)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker, machine in self.machines.items():
            machine.tick()
            self._collect(worker)

    def run(self, most: int = 1_000_000) -> int:
        """Delivers up to `most` messages, until none is left; returns their number."""
        moved = 0
        while moved < most and self.deliver():
            moved += 1
        return moved

    def _collect(self, worker: int) -> None:
        for done in self.machines[worker].summed():
            kept = self.landed[worker].get(done.key)
            assert kept is None or kept is done, f"worker {worker} completed {done.key} twice"
            self.landed[worker][done.key] = done
            if worker not in self.keeping:
                self.machines[worker].land(done.key)

    # -- reading ----------------------------------------------------------------------------------------------------

    def mean(self, key: str) -> Tensor:
        """The mean of a round, after a check that every worker holds the same bits."""
        found = [self.landed[worker][key].mean for worker in sorted(self.machines)]
        for other in found[1:]:
            assert torch.equal(found[0].view(torch.int32), other.view(torch.int32))
        return found[0]

    def total(self, key: str) -> Tensor:
        """The sum of a round's counted contributions, by their owners: mean × number counted, for each chunk."""
        machine = next(iter(self.machines))
        done = self.landed[machine][key]
        total = done.mean.clone()
        for chunk, workers in zip(self.chunks(key), self.counted_by_chunk(key), strict=True):
            total[chunk[0] : chunk[1]] *= len(workers)
        return total

    def chunks(self, key: str) -> list[tuple[int, int]]:
        done = self.landed[next(iter(self.machines))][key]
        bits = codec("float32").bits
        members = range(done.members)
        return [(c.start, c.stop) for c in cut(done.fragment, members, bits)]

    def counted_by_chunk(self, key: str) -> list[list[int]]:
        return [self.counted[key][index] for index in sorted(self.counted[key])]

    def owed(self) -> Tensor:
        """All contributions that have not landed: residuals of workers, and of owners in units of sums."""
        total = torch.zeros(self.size, dtype=torch.float64)
        for worker, machine in self.machines.items():
            total += self.residual[worker].double()
            total += self.owner_residual[worker].double() * len(machine.members)
        return total


@pytest.fixture(scope="session")
def mesh() -> type[Mesh]:
    return Mesh
