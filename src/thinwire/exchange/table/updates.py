"""One worker's own updates of a table: sent to every server, and landed once every server has replied."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange.signals import Landed, LeftOut
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.station import Station
from thinwire.exchange.table.host import Host, as_values
from thinwire.exchange.table.plan import Layout
from thinwire.exchange.table.server import Reply
from thinwire.parameters import Fragment
from thinwire.protocol import messages
from thinwire.rules.finite import count_not_finite, is_finite
from thinwire.strategies import Served

FLOAT_BYTES = 4


@dataclass
class _Flight:
    """A contribution of this worker's that is under way."""

    fragment: Fragment
    values: Tensor
    weight: float
    reply: Tensor
    missing: set[int]
    """Tuples whose servers have not replied."""
    held: set[int]
    """Tuples whose values have yet to be made."""
    rates: tuple[float, ...] = ()
    absent: frozenset[int] = frozenset()
    """Parameters, by number, without a gradient."""
    started: float = 0.0
    line: int | None = None
    """Of updates, in which servers know it by its number; None until it was sent."""
    withheld: bool = False
    """Whether the tuples that have yet to be sent count for nothing."""
    over: bool = False
    """Whether servers may have begun anew with it: they are to answer it, and not to merge it."""
    size_bytes: int = 0


class Updates:
    """Contributions under way, by round. `claim` and `next_round` are safe on any thread."""

    def __init__(self, station: Station, layout: Layout, host: Host) -> None:
        self._station, self._layout, self._host = station, layout, host
        self.tuples = layout.fragments
        strategy = station.joint.strategy
        self._strict = isinstance(strategy, Served) and strategy.strict
        self._numbering = threading.Lock()
        self._next_round = station.joint.landed
        self._flights: dict[int, _Flight] = {}
        self._own: deque[tuple[int, int]] = deque()
        """Rounds and tuples of this worker's for servers here: one at a time, between messages of other workers."""

    # -- numbers ----------------------------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        """The number of the round that would be claimed next."""
        with self._numbering:
            return self._next_round

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round that this worker is to launch next."""
        with self._numbering:
            round = self._next_round
            self._next_round += 1
        return round, Fragment(0, self._station.joint.size)

    def catch_up(self) -> None:
        """Numbers no round that the joint state has already: a checkpoint or a peer's state was loaded."""
        with self._numbering:
            self._next_round = max(self._next_round, self._station.joint.landed)

    # -- launching --------------------------------------------------------------------------------------------------

    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor, weight: float, rates: tuple[float, ...]
    ) -> None:
        """Launches a claimed round; under a strategy of gradients each tuple waits until it is fed."""
        strategy = self._station.joint.strategy
        taken = snapshot.take() if isinstance(snapshot, Snapshot) else snapshot
        values = strategy.contribute(self._station.joint.state, taken)
        keys = set(range(len(self._layout.fragments)))
        held = set(keys) if strategy.subject == "gradients" else set()
        reply, now = torch.empty_like(values), self._station.time.now()
        flight = _Flight(fragment, values, weight, reply, keys, held, rates, started=now)
        self._flights[round] = flight
        if not held and not is_finite(values):
            flight.withheld = True
            self._station.signals.put(LeftOut(round, count_not_finite(values), False))
        self._send_off(round, keys)

    def withhold(self, round: int) -> None:
        """What has yet to be sent of a round counts for nothing."""
        if round in self._flights:
            self._flights[round].withheld = True

    def feed(self, round: int, keys: list[int], absent: frozenset[int] = frozenset()) -> None:
        """Sends tuples of a round whose values are made."""
        if round in self._flights:
            self._flights[round].absent = absent
            self._flights[round].held.difference_update(keys)
            self._send_off(round, set(keys))

    def abandon(self, round: int) -> None:
        """Gives up a round whose values were never all made."""
        if self._flights.pop(round, None) is not None:
            self._land_answered()  # later rounds that only waited for this one

    def drop(self) -> None:
        """A joint state comes over all that was under way."""
        self._flights = {}

    def _send_off(self, round: int, keys: set[int]) -> None:
        """Sends what has no reply yet, beginning with another host than the other workers do."""
        if self._station.standing.frozen:
            return  # when the generation has formed
        flight, count, me = self._flights[round], len(self._layout.fragments), self._station.worker
        flight.line = self._host.plan.line if self._host.plan else None
        first = me * count // max(1, self._layout.servers)
        for key in sorted(keys & flight.missing - flight.held, key=lambda k: (k - first) % count):
            if self._host.of(key) == me:
                self._own.append((round, key))
            else:
                flight.size_bytes += FLOAT_BYTES * self._layout.fragments[key].size
                self._send(round, key)
        if self._own:
            self._station.wake()

    def _send(self, round: int, key: int) -> None:
        flight, strategy = self._flights[round], self._station.joint.strategy
        assert isinstance(strategy, Served)
        values: Tensor | None = self._layout.fragments[key].of(flight.values)
        assert values is not None
        left_out = flight.withheld
        if not left_out and strategy.subject == "gradients" and not is_finite(values):
            left_out = True
            self._station.signals.put(LeftOut(round, count_not_finite(values), False))
        weight, values = (0.0, None) if left_out else (flight.weight, values)
        absent = flight.absent.intersection(strategy.parameters_in(self._layout.fragments[key]))
        self._station.tell(
            self._host.of(key),
            messages.Update,
            None if values is None else values.numpy().data,
            key=key,
            number=round,
            weight=weight,
            rates=flight.rates,
            absent=tuple(sorted(absent)),
            over=flight.over,
        )

    def tick(self) -> None:
        """Gives one tuple to a server that is hosted here."""
        if self._own:
            round, key = self._own.popleft()
            if round in self._flights and key in self._flights[round].missing:
                self._send(round, key)
            self._station.wake()

    # -- landing ----------------------------------------------------------------------------------------------------

    def take_reply(self, reply: messages.Reply, payload: memoryview | None) -> None:
        """A server of another worker has replied."""
        key, own = self._layout.key(reply.key), self._station.identity
        values = None if reply.empty else as_values(payload, self._layout.fragments[key].size)
        self.landed(Reply(own.worker, own.attempt, key, reply.number, reply.version, values))

    def landed(self, reply: Reply) -> None:
        """A server has replied to an update of this worker."""
        flight = self._flights.get(reply.number)
        if flight is None or reply.key not in flight.missing:
            return
        target = self._layout.fragments[reply.key].of(flight.reply)
        if reply.values is None:  # it was merged, and what came of it is lost
            target.zero_()
        else:
            target.copy_(reply.values)
        flight.missing.discard(reply.key)
        self._land_answered()

    def _land_answered(self) -> None:
        joint, time = self._station.joint, self._station.time
        while self._flights and not self._flights[min(self._flights)].missing:
            round = min(self._flights)
            done = self._flights.pop(round)
            with joint.lock:
                joint.landed = max(joint.landed, round + 1)
            taken, own = time.now() - done.started, {self._station.worker: self._station.note()}
            size = done.size_bytes
            self._station.signals.put(Landed(round, done.fragment, done.reply, None, own, None, None, taken, size))

    def waiting_for(self) -> dict[str, list[int]]:
        """Rounds under way, and the hosts whose replies each of them misses."""
        hosts = self._host.of if self._host.plan else None
        return {
            f"table:{round}": sorted({hosts(key) for key in flight.missing}) if hosts else []
            for round, flight in self._flights.items()
        }

    # -- generations ------------------------------------------------------------------------------------------------

    def send_again(self) -> None:
        """Sends what has no reply to the hosts of a generation that has just begun."""
        plan = self._host.plan
        for round, flight in sorted(self._flights.items()):
            if self._undone():
                flight.missing = set(range(len(self._layout.fragments)))
            other = flight.line not in (None, plan.line if plan else None)
            if self._station.standing.needs_state and other:
                self._flights.pop(round)  # the joint state comes over it
                continue
            flight.over |= other and self._began_anew()
            self._send_off(round, flight.missing)

    def _undone(self) -> bool:
        """Whether servers may have undone updates of this worker, even those to which they have replied.

        They went back to a checkpoint, and know which updates are in it. Where the reference put in its replica they do
        not know; a contribution is then given again only under strict consistency, where servers would wait for it.
        """
        plan = self._host.plan
        return plan is not None and (plan.kind == "back" or (plan.kind == "put" and self._strict))

    def _began_anew(self) -> bool:
        """Whether it is unknown which updates are in the servers' values: a contribution is lost, not counted twice."""
        plan = self._host.plan
        return plan is not None and plan.kind == "put" and not self._strict
