"""Whoever comes to a port of a run without its keys gets nothing, changes nothing, and holds nobody up."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import zmq
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.exchange.wire import Keys, ZmqHub, ZmqLink

from .surroundings import Port, Slow, listening, poll, stranger, visitor

SILENT, GARBAGE, CROWD = 200, 50, 2000
WORDS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03" * 200, os.urandom(4096))
UNTOUCHED = ("complete", "workers_lost", "generations", "rows", "steps")


class Stacked(nn.Module):
    """Two layers to be spread over a group, whose steps take 20 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return self.second(torch.relu(self.first(x.flatten(1))))


class Mob:
    """Comes to every port as soon as a generation has formed, and leaves when the run has ended."""

    def __init__(self, keys: list[Keys], expected: int) -> None:
        self._keys, self._expected = keys, expected
        self._known = set(listening())
        self.ports: list[Port] = []
        self.answers = 0
        self.held: list[Any] = []
        self._thread: threading.Thread | None = None

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Progressed) and self._thread is None:
            self._thread = threading.Thread(target=self._come)
            self._thread.start()

    def _come(self) -> None:
        poll(lambda: len(set(listening()) - self._known) >= self._expected)
        self.ports = sorted(set(listening()) - self._known)
        other, mine = Keys.make(), self._keys[-1]
        for port in self.ports:
            address = f"tcp://{port.host}:{port.number}"
            for server in (None, other.server_public, mine.server_public):
                self.held.append(stranger(address, other.client_public, other.client_secret, server))
            for number in range(GARBAGE):
                self.held.append(visitor(port, WORDS[number % len(WORDS)]))
            self.held += [visitor(port, b"") for _ in range(SILENT)]
        self.held += [visitor(self.ports[0], b"") for _ in range(CROWD)]
        for one in self.held:
            if isinstance(one, zmq.Socket):
                self.answers += one.poll(20)

    def leave(self) -> None:
        assert self._thread is not None
        self._thread.join()
        for one in self.held:
            if one is not None:
                one.close()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Keys]:
    """The keys of every run from here on."""
    made: list[Keys] = []
    make = Keys.make

    def keep() -> Keys:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(Keys, "make", keep)
    return made


def run(model: nn.Module, callbacks: list[Any], **more: Any) -> tw.Result:
    strategy = tw.SparkNet(period=10)
    cluster = tw.Local(workers=2, threads=1)
    settings: dict[str, Any] = {"strategy": strategy, "cluster": cluster, "epochs": 14, "batch_size": 64}
    torch.manual_seed(1)
    return tw.fit(model, "digits", validation=0.2, callbacks=callbacks, progress=False, **settings, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "placement", "expected"),
    [(Slow, tw.Whole(), 3), (Stacked, tw.TensorParallel(group_size=2), 6)],
    ids=["a mesh", "a group over gloo"],
)
def test_a_run_besieged_at_every_port_comes_to_what_it_comes_to_alone(
    monkeypatch: pytest.MonkeyPatch, network: type[nn.Module], placement: Any, expected: int
) -> None:
    torch.manual_seed(0)
    model = network()
    keys = recorded(monkeypatch)
    mob = Mob(keys, expected)
    besieged = run(model, [mob], placement=placement)
    mob.leave()
    assert len({port.number for port in mob.ports}) == expected, "the driver's, and each worker's own"
    assert {port.host for port in mob.ports} == {"127.0.0.1"}, "a local run is for this machine alone"
    assert mob.answers == 0
    assert sum(one is not None for one in mob.held) > CROWD, "it was there while the run went on"
    alone = run(model, [], placement=placement)
    assert [besieged.summary[name] for name in UNTOUCHED] == [alone.summary[name] for name in UNTOUCHED]
    for mine, theirs in zip(besieged.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert besieged.summary["refused"] > 0, "connections with other keys are counted"
    assert alone.summary["refused"] == 0


def test_who_lacks_the_keys_is_counted_at_the_driver_and_at_a_worker_and_heard_by_neither() -> None:
    keys, other = Keys.make(), Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    outside = [
        stranger(address, other.client_public, other.client_secret, server)
        for address in (hub.address, link.address)
        for server in (other.server_public, keys.server_public)
    ]
    heard = []

    def counted() -> bool:
        heard.extend(hub.receive(0.05))
        heard.extend(link.receive(0.05))
        return hub.refused >= 2 and link.refused >= 2

    try:
        poll(counted)
        link.send(-1, {"t": "beat", "a": 0})
        poll(lambda: counted() and bool(heard))
        assert [message.header["t"] for message in heard] == ["beat"]
    finally:
        for one in outside:
            one.close()
        link.close()
        hub.close()


def test_a_peer_that_calls_itself_the_coordinator_is_refused() -> None:
    """It has the keys: what it says is still no order."""
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    victim = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    peer = ZmqLink(me=-1, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    heard: list[Any] = []
    try:
        peer.connect({0: victim.address})
        peer.send(0, {"t": "leave", "why": "I say so"})
        poll(lambda: heard.extend(victim.receive(0.05)) or victim.refused > 0)
        assert heard == []
    finally:
        for end in (peer, victim, hub):
            end.close()
