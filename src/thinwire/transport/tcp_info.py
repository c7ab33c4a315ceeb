"""What the kernel counts of this process's connections to its peers, by TCP_INFO; nothing of them is changed."""

from __future__ import annotations

import os
import socket as net
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from thinwire.transport.ports import Traffic

TICK_S = 0.004
"""The kernel counts busy time in ticks of its clock: a hundredth of a second at most, usually this."""
SIZE = 192
_ACKED, _MIN_RTT, _BUSY, _NO_ROOM = 120, 148, 168, 176
"""Where Linux (4.10 or later) has bytes acknowledged, the shortest round trip, and microseconds: with something on its
way, and of these the ones in which the receiver had no room for more."""


class _Connection(NamedTuple):
    acked: int
    busy_us: int
    round_trip_us: int


class TcpTraffic:
    """Adds up what connections count, one interval after the other: they come and go."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, object], _Connection] = {}
        self._total = Traffic(0, 0.0)

    def read(self, peers: Collection[str]) -> Traffic:
        """What has crossed connections to these addresses until now.

        Connections to several peers send at the same time: in each interval the one that was busy longest counts.
        Those within this machine cross no wire.
        """
        found = dict(_connections({address.removeprefix("tcp://") for address in peers}))
        gone = {key: self._seen.get(key, _Connection(0, 0, 0)) for key in found}
        sent = sum(now.acked - gone[key].acked for key, now in found.items())
        busy_us = max((now.busy_us - gone[key].busy_us for key, now in found.items()), default=0)
        trip_us = min((now.round_trip_us for now in found.values()), default=0)
        self._seen = found
        total = self._total
        self._total = Traffic(
            total.sent_bytes + max(0, sent),
            total.busy_s + max(0, busy_us) / 1e6,
            trip_us / 1e6,
            trip_us / 1e6,
            TICK_S if found else total.tick_s,
        )
        return self._total


def _connections(peers: Collection[str]) -> Iterator[tuple[tuple[object, object], _Connection]]:
    """This process's connections to other machines among these, by both ends' addresses."""
    if not hasattr(net, "TCP_INFO"):
        return
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            socket = net.socket(net.AF_INET, net.SOCK_STREAM, 0, fileno=descriptor)
        except OSError:  # another kind of file, or closed by now
            continue
        try:
            here, there = socket.getsockname(), socket.getpeername()
            if here[0] == there[0] or f"{there[0]}:{there[1]}" not in peers:
                continue
            told = socket.getsockopt(net.IPPROTO_TCP, net.TCP_INFO, SIZE)
        except (OSError, IndexError, TypeError):  # no socket of TCP
            continue
        finally:
            socket.detach()  # it is not this object's to close
        if len(told) >= _NO_ROOM + 8:
            acked, busy, no_room = (struct.unpack_from("=Q", told, at)[0] for at in (_ACKED, _BUSY, _NO_ROOM))
            (trip,) = struct.unpack_from("=I", told, _MIN_RTT)
            yield (here, there), _Connection(acked, max(0, busy - no_room), trip)
