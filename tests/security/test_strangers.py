"""Whoever comes to a port of a run without its keys gets nothing, changes nothing, and holds nobody up."""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import nn

import thinwire as tw
from thinwire import events
from thinwire.transport.zmq import Keys, ZmqHub, ZmqLink

from .surroundings import Port, listening, poll, stranger, visitor

SILENT, GARBAGE, CROWD = 200, 50, 1000
WORDS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03" * 200, os.urandom(4096))
pytestmark = pytest.mark.timeout(1800)
UNTOUCHED = ("complete", "workers_lost", "generations", "rows", "steps")


def held(file: str, columns: dict[str, Any]) -> dict[str, Any]:
    """A transform that waits while a file is there: what happens then happens in the midst of a run."""
    while os.path.exists(file):
        time.sleep(0.02)
    return columns


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Mob:
    """Comes to every port as soon as a generation has formed, lets the run go on, and stays to its end."""

    def __init__(self, keys: list[Keys], expected: int, gate: Path) -> None:
        self._keys, self._expected, self._gate = keys, expected, gate
        self._known = set(listening())
        self.ports: list[Port] = []
        self.answers = 0
        self.held: list[Any] = []
        self._thread: threading.Thread | None = None

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.GenerationFormed) and self._thread is None:
            self._gate.touch()
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
        self._gate.unlink()

    def leave(self) -> None:
        assert self._thread is not None
        self._thread.join()
        for one in self.held:
            if isinstance(one, zmq.Socket):
                self.answers += one.poll(0)
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


def run(callbacks: list[Any], **more: Any) -> tw.Result:
    strategy = tw.SparkNet(period=5)
    cluster = tw.Local(workers=2, threads=1)
    settings: dict[str, Any] = {"strategy": strategy, "cluster": cluster, "epochs": 4, "batch_size": 64}
    return tw.fit(
        network(), "digits", inputs=["pixels"], validation=0.2, callbacks=callbacks, progress=False, **settings, **more
    )


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param(tw.Whole(), 3, id="a mesh"),
        pytest.param(tw.TensorParallel(group_size=2), 6, id="a group over gloo", marks=pytest.mark.long),
    ],
)
def test_a_run_besieged_at_every_port_comes_to_what_it_comes_to_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, placement: Any, expected: int
) -> None:
    gate = tmp_path / "gate"
    settings = {"placement": placement, "transform": functools.partial(held, str(gate))}
    mob = Mob(recorded(monkeypatch), expected, gate)
    besieged = run([mob], **settings)
    mob.leave()
    assert len({port.number for port in mob.ports}) == expected, "the driver's, and each worker's own"
    assert {port.host for port in mob.ports} == {"127.0.0.1"}, "a local run is for this machine alone"
    assert mob.answers == 0
    assert sum(one is not None for one in mob.held) > CROWD, "it was there while the run went on"
    alone = run([], **settings)
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


GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP's: whoever says it is asked for a handshake."""


def resident_mb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10


def announce(to: socket.socket, length: int) -> None:
    """A frame of so many bytes, and 62 MiB of it."""
    to.sendall(b"\x06" + struct.pack(">Q", length))
    for _ in range(62):
        to.sendall(bytes(1 << 20))
        time.sleep(0.005)


def test_a_stranger_who_announces_a_long_frame_is_shown_out_before_it_is_in_memory() -> None:
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    held: list[socket.socket] = []
    try:
        before = resident_mb()
        for address, longest in ((hub.address, 64 << 10), (link.address, 2 << 20)):
            for _ in range(8):
                held.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30))
                held[-1].sendall(GREETING)
                assert held[-1].recv(64)
                with pytest.raises(ConnectionError):  # the other end has closed it, and takes no more
                    announce(held[-1], longest + 1)
        assert resident_mb() - before < 100
        poll(lambda: hub.refused >= 7 and link.refused == 8)  # one may pass for the link, which came at the same time
    finally:
        for one in held:
            one.close()
        link.close()
        hub.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops requests at a socket")
def test_a_crowd_of_silent_strangers_leaves_a_worker_descriptors_for_its_checkpoints() -> None:
    crowd(256, 400, 3.0)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops requests at a socket")
def test_a_thousand_silent_strangers_leave_a_worker_descriptors_for_its_checkpoints() -> None:
    crowd(1024, 1100, 12.0)


def crowd(limit: int, count: int, seconds: float) -> None:
    words = [sys.executable, "-m", "tests.security.crowded", str(limit)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, text=True, **pipes) as worker:
        assert worker.stdout is not None
        said = json.loads(worker.stdout.readline())
        assert said["soft"] == limit, "the soft limit was half of it"
        held = [socket.socket() for _ in range(count)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", int(said["address"].rpartition(":")[2])))
        time.sleep(seconds)
        out, error = worker.communicate("\n", timeout=60)
        for one in held:
            one.close()
    told = json.loads(out)
    assert told["failed"] == 0, told
    assert told["most"] < limit
    if seconds > 5.0:
        assert told["refused"] > 60
        assert "connections from 127.0.0.1 had not this run's keys" in error
