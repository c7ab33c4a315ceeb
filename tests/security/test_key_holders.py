"""A peer that has the run's keys and says what it likes is refused message by message, and ends nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tests.forms import has_form
from tests.unit.test_coordinator import Script
from thinwire import events
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.rate_limit import BURST
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import AMONG_WORKERS, TO_COORDINATOR, Message
from thinwire.transport.reliable import Channel, ReliableHub
from thinwire.transport.zmq import Keys, ZmqHub, ZmqLink

from .surroundings import poll

NUMBERS: tuple[Any, ...] = (math.inf, -math.inf, math.nan, -1, 2**63, 10**400, 0.5, "1", None, [], {}, True)
ADDRESSES: tuple[Any, ...] = ("nonsense", "", "tcp://", "tcp://h", "tcp://h:x", "tcp://a b:1", "ipc:///tmp/x", 5, None)
ADDRESSES += ("tcp://127.0.0.1:5\n", "inproc://wake", "pgm://eth0;1.2.3.4:5", "tcp://*:5", "tcp://" + "h" * 999 + ":5")
ADDRESSES += ("tcp://eth0;h:5", "@inproc://x", "\ud800", "memory:1", "memory:1.x")


@pytest.fixture
def ends() -> Iterator[tuple[ReliableHub, Any]]:
    """The driver's end as a run has it, and a raw socket with the run's keys under a number that nobody has."""
    keys = Keys.make()
    hub = ReliableHub(ZmqHub(keys=keys, host="127.0.0.1"))
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.linger, peer.identity = 0, b"99.0"
    peer.curve_publickey, peer.curve_secretkey = keys.client_public, keys.client_secret
    peer.curve_serverkey = keys.server_public
    peer.connect(hub.address)
    yield hub, peer
    peer.close()
    hub.close()


def test_marks_that_are_no_numbers_are_refused_one_by_one(ends: tuple[ReliableHub, Any]) -> None:
    hub, peer = ends
    said = [{"t": "mark", "a": 0, "m": [bad, 0, 0]} for bad in NUMBERS]
    said += [{"t": "mark", "a": 0, "m": [1, bad, 0]} for bad in NUMBERS]
    said += [{"t": "mark", "a": 0, "m": bad} for bad in NUMBERS]
    said += [{"t": "bye", "a": 0, "m": [1, 0, 0], "q": bad} for bad in NUMBERS]
    said += [{"t": "bye", "a": bad, "m": [1, 0, 0], "q": 1} for bad in NUMBERS]
    said += [
        {"t": "mark", "a": 0, "m": [1, 2**62, 0]},
        {"t": "mark", "a": 0, "m": [1, 0, 2**62]},
        {"t": "mark", "m": []},
    ]
    for header in said:
        peer.send(json.dumps(header).encode())
    heard: list[Message] = []
    poll(lambda: bool(heard.extend(hub.receive(0.05))) or hub.refused == len(said))
    assert heard == []


def test_what_nobody_said_cannot_have_been_heard() -> None:
    """Else each such message would have all said again."""
    channel = Channel()
    for _ in range(3):
        channel.number({"t": "verdict"}, None)
    true = {"t": "mark", "a": 0, "m": [1, 2, 2]}
    assert len(channel.take(Message(0, true))[1]) == 0
    with pytest.raises(Exception, match="3 words were said"):
        channel.take(Message(0, {"t": "mark", "a": 0, "m": [2, 4, 2]}))


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
def test_a_link_survives_an_address_that_is_none(address: Any) -> None:
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    try:
        link.connect({1: address})
        link.send(1, {"t": "want", "g": 1, "a": 0})
        link.send(-1, {"t": "beat", "a": 0})
        poll(lambda: [message.header["t"] for message in hub.receive(0.05)] == ["beat"])
    finally:
        link.close()
        hub.close()


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
def test_an_address_that_is_none_is_refused_before_a_worker_is_told_of_it(address: Any) -> None:
    assert not has_form(TO_COORDINATOR, {"t": "join", "a": 1, "address": address})


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:41234", "tcp://node-7.local:80", "memory:3.1", "12.4"])
def test_addresses_of_every_wire_are_has_form(address: str) -> None:
    assert has_form(TO_COORDINATOR, {"t": "join", "a": 1, "address": address})


def test_a_newer_attempt_nowhere_and_a_worker_that_nobody_expects_take_no_place() -> None:
    script, log = Script(farewell_s=0.0), list[events.Event]()
    for worker, attempt, address in ((0, 1, "nonsense"), (99, 0, "memory:99.0"), (2**40, 5, "memory:0.0")):
        header = {"t": "join", "a": attempt, "address": address, "rows": 8, **hello()}
        script.inbox.append(Message(worker, header, None))
    policy = Policy(1, deadlines=Deadlines(settle_s=0.0), min_workers=0)
    outcome = Coordinator(script, script, policy, emit=log.append, time=script).run()
    assert outcome.refused == 3
    assert outcome.workers_lost == 0
    assert outcome.reason == "all rows done"
    assert [e.attempt for e in log if isinstance(e, events.WorkerJoined)] == [0]


TRUE: dict[str, dict[str, Any]] = {
    "part": {"r": "train:0", "s": [0, 8], "k": "float32", "c": 0, "w": 1.0, "n": {"rows": 5}},
    "sum": {"r": "train:0", "s": [0, 8], "k": "int8", "c": 1, "i": [0, 1], "n": {"0": {"rows": 5}}, "e": True},
    "open": {"r": "train:0", "s": [0, 8], "k": "float32", "c": 0},
    "want": {},
    "state": {"i": 0, "n": 1, "d": 1},
    "update": {"k": 0, "n": 0, "w": 1.0, "rates": [0.1], "absent": [1], "over": False},
    "reply": {"k": 0, "n": 0, "v": 1, "to": 0, "e": False},
    "get": {"k": 0},
    "value": {"k": 0},
    "move": {"k": 0},
    "moved": {"k": 0},
    "copy": {"k": 0, "v": [1, 0]},
    "mark": {"p": [1, 1], "n": {"publish": 1}},
    "page": {"k": 0, "p": [1, 1], "whole": False},
    "have": {"p": [1, 1]},
    "go": {"p": [1, 1]},
    "note": {"n": {"rows": 5}},
    "done": {"d": True},
}
OPTIONAL = {("part", "n"), ("sum", "n"), ("sum", "e")}


def test_the_forms_among_workers_are_those_of_true_messages_and_of_no_others() -> None:
    assert set(AMONG_WORKERS) == set(TRUE)
    strange = (None, -1, 2**63, math.nan, math.inf, "many", [None], {"a": 1}, 0.5)
    for kind, more in TRUE.items():
        header = {"t": kind, "g": 1, "a": 0, **more}
        assert has_form(AMONG_WORKERS, header), kind
        for name in ("g", "a", *more):
            without = {key: value for key, value in header.items() if key != name}
            assert has_form(AMONG_WORKERS, without) == ((kind, name) in OPTIONAL), (kind, name)
            assert sum(has_form(AMONG_WORKERS, header | {name: value}) for value in strange) <= 3, (kind, name)
    assert not has_form(AMONG_WORKERS, {"t": "gift", "g": 1, "a": 0})


def test_a_flood_of_events_and_reports_is_cut_off_and_the_run_completes() -> None:
    script, log = Script(farewell_s=0.0), list[events.Event]()
    told = {"worker": 0, "attempt": 0, "generation": 1, "landed": 3, "digest": "d"}
    header = {"t": "event", "a": 0, "kind": "rejoined", "fields": told}

    def flood(number: int, attempt: int, said: dict[str, Any], payload: memoryview | None = None) -> None:
        answer(number, attempt, said, payload)
        if said["t"] == "commit":
            inbox.extend([Message(0, header, None)] * (BURST + 5_000))

    answer, inbox, receive = script.send, list[Message](), script.receive

    def heard(timeout_s: float) -> list[Message]:
        found = [*receive(timeout_s), *inbox]
        inbox.clear()
        return found

    script.send, script.receive = flood, heard  # type: ignore[method-assign]
    policy = Policy(1, deadlines=Deadlines(settle_s=0.0), min_workers=0)
    outcome = Coordinator(script, script, policy, emit=log.append, time=script).run()
    assert sum(isinstance(event, events.Rejoined) for event in log) == BURST
    assert outcome.refused == 5_000
    assert outcome.reason == "all rows done"
