"""The worker's end of a benchmark: real links, peers and coordinator, in processes that a `Processes` starts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.checkpoint import decode, encode
from thinwire.cluster.process import make_own
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.ports import Exit
from thinwire.errors import TimedOutError
from thinwire.exchange.joint import JointState
from thinwire.exchange.peer import Identity as PeerSeat
from thinwire.exchange.peer import Peer, TreeCodec
from thinwire.exchange.signals import Broken, Signal
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import Bye
from thinwire.transport import zmq as wire
from thinwire.transport.zmq import Keys, ZmqHub, ZmqLink

S = TypeVar("S", bound=Signal)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one worker in a benchmark; sent to the worker as JSON, through a pipe."""

    worker: int
    workers: int
    host: str
    coordinator: str
    first: str
    """The first worker's host, where torch.distributed's processes meet."""
    port: int
    """A free port on the first worker's host."""
    keys: tuple[str, str, str, str]


def make_keys() -> tuple[str, str, str, str]:
    """A run's keys as text."""
    keys = Keys.make()
    pairs = (keys.server_public, keys.server_secret, keys.client_public, keys.client_secret)
    first, second, third, fourth = (k.decode() for k in pairs)
    return first, second, third, fourth


def join(place: Place, joint: JointState, codec_name: str, rows: int = 1, **kind: Any) -> Peer:
    """A worker's exchange, before it starts."""
    keys = Keys(*(k.encode() for k in place.keys))
    link = ZmqLink(me=place.worker, attempt=0, keys=keys, coordinator=place.coordinator, host=place.host)
    seat = PeerSeat(place.worker, 0, hello() | {"rows": rows})
    return Peer(link, seat, joint, codec_name=codec_name, trees=TreeCodec(encode, decode), silence_s=60.0, **kind)


def wait_for(peer: Peer, kind: type[S], timeout_s: float = 120.0) -> S:
    """The next signal of a kind; discards signals of other kinds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for signal in peer.signals(0.5):
            if isinstance(signal, Broken):
                raise signal.error
            if isinstance(signal, kind):
                return signal
    raise TimedOutError(f"no {kind.__name__} came within {timeout_s:g} s; look at the output of the other workers")


def leave(peer: Peer) -> None:
    """Tells the coordinator good-bye and ends the exchange."""
    peer.report(Bye(attempt=0))
    peer.close()


class NoReplacements:
    """A workforce without replacements: the benchmark's driver watches the processes itself."""

    revives = False

    def exits(self) -> list[Exit]:
        return []

    def replace(self, worker: int, attempt: int) -> bool:
        return False

    def stop(self) -> None:
        return


def coordinate(host: str, workers: int, keys: tuple[str, str, str, str]) -> dict[str, Any]:
    """Runs the coordinator of a benchmark; prints its address first."""
    hub = ZmqHub(keys=Keys(*(k.encode() for k in keys)), host=host)
    print(json.dumps({"address": hub.address}), flush=True)
    policy = Policy(workers=workers, deadlines=Deadlines(silence_s=60.0))
    try:
        outcome = Coordinator(hub, NoReplacements(), policy, emit=lambda event: None).run()
    finally:
        hub.close()
    return {"rounds": outcome.rounds, "refused": outcome.refused, "generations": outcome.generations}


def without_curve() -> None:
    """Removes authentication and encryption from this process's links, to measure their cost. For benchmarks only."""

    class Plain(wire._Sockets):
        def _authenticated(self, socket: Any) -> None:
            return

        def _authenticating(self, socket: Any) -> None:
            return

    wire._Sockets = Plain  # type: ignore[misc]


def main(tasks: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Runs the task that stdin names; prints the result as the last line."""
    order = json.loads(sys.stdin.readline())
    if order.get("plain"):
        without_curve()
    if order["task"] == "coordinate":
        found = coordinate(order["host"], order["workers"], order["keys"])
    else:
        make_own(int(order["threads"]))  # the same settings as in real workers
        found = tasks[order["task"]](Place(**order["place"]), **order["options"])
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of gloo and zmq must not delay the exit
