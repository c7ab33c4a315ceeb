"""The rate of a network when all nodes send to all others at once, measured with plain sockets for forecasts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from thinwire_lab.bench.worker_process import Place

TURNS, DEADLINE_S = 4, 60.0
PIECE = 1 << 16


def all_to_all(place: Place, *, size_bytes: int, hosts: list[str]) -> dict[str, Any]:
    """Seconds in which a worker sends `size_bytes`, an equal part to each peer, and receives as much; several turns."""
    peers = _meet(place, hosts)
    part = size_bytes // (place.workers - 1)
    values, heard = bytes(part), [bytearray(PIECE) for _ in peers]
    seconds = []
    for _ in range(TURNS):
        _together([partial(p.sendall, b"!") for p in peers], [partial(_hear, p, 1, bytearray(1)) for p in peers])
        began = time.perf_counter()
        hears = [partial(_hear, peer, part, room) for peer, room in zip(peers, heard, strict=True)]
        _together([partial(peer.sendall, values) for peer in peers], hears)
        seconds.append(time.perf_counter() - began)
    for peer in peers:
        peer.close()
    return {"seconds": seconds[1:]}


def _meet(place: Place, hosts: list[str]) -> list[socket.socket]:
    """A connection to every other worker: the one with the lower number listens, the other one connects."""
    listening = socket.create_server((place.host, place.port + 1 + place.worker), backlog=place.workers)
    listening.settimeout(DEADLINE_S)
    peers = []
    for other in range(place.worker):
        peers.append(_call(hosts[other], place.port + 1 + other))
    for _ in range(place.worker + 1, place.workers):
        peers.append(listening.accept()[0])
    for peer in peers:
        peer.settimeout(DEADLINE_S)
    listening.close()
    return peers


def _call(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=DEADLINE_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _hear(peer: socket.socket, size: int, room: bytearray) -> None:
    while size > 0:
        got = peer.recv_into(room, min(size, len(room)))
        if not got:
            raise ConnectionError("a peer of the benchmark went away")
        size -= got


def _together(*acts: Iterable[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=act) for act in chain(*acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
