"""A table member that is sent nonsense: refused and counted, and training goes on unharmed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinwire.checkpoint import encode
from thinwire.protocol.messages import Message

from .test_table import PLACES, TUPLES, WORKERS, Tables, tables

__all__ = ["tables"]
KINDS = [
    "update",
    "get",
    "value",
    "mark",
    "page",
    "have",
    "go",
    "move",
    "moved",
    "copy",
    "note",
    "done",
    "reply",
    "what",
]
VALUES: list[Any] = [None, -1, 0, 3, 10**12, 2.5, "x", [], [1], [1, 2], [10**9, 10**9], {}, {"rows": "many"}, True]
FIELDS = ["k", "n", "w", "p", "v", "d", "e", "to", "whole", "rates", "absent", "a", "g"]
PAYLOADS = [None, b"", b"abc", bytes(4 * PLACES), bytes(4 * PLACES + 4), encode({"state": []}), encode([1, 2])]


def forged(stage: Tables, draw: random.Random) -> Message:
    """A message as a member might send it, with fields that do not fit, or are not there."""
    header = {"t": draw.choice(KINDS), "g": stage.peers[0].member.rounds.generation, "a": 0}
    for field in draw.sample(FIELDS, draw.randint(0, len(FIELDS))):
        header[field] = draw.choice(VALUES)
    payload = draw.choice(PAYLOADS)
    return Message(1, header, None if payload is None else memoryview(bytearray(payload)))


def harmless(message: Message) -> bool:
    """Not a whole update, move, mark or checkpoint that a member with the run's keys may as well have meant."""
    header, payload = message.header, message.payload
    whole = payload is not None and payload.nbytes == 4 * PLACES
    kinds = ("mark", "go", "done", "copy", "page")
    return not (header["t"] == "update" and whole) and header["t"] not in kinds


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_nonsense_changes_no_update(tables: Callable[..., Tables], seed: int) -> None:
    stage, draw = tables(seed), random.Random(seed)
    for _ in range(400):
        message = forged(stage, draw)
        if harmless(message):
            stage.peers[0].member._link.ready.append(message)
        if draw.random() < 0.2:
            stage.shake(3)
    stage.settle()
    for worker in range(WORKERS):
        stage.send(worker)
    stage.settle()
    found = stage.assert_sound()
    sent = {stage.place(w, r) for w in stage.peers for r in stage.heard_of(w)}
    assert {p for p in range(PLACES) if found[:, p].all()} == sent
    assert stage.peers[0].member.rounds.refused > 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_exchange_goes_on(tables: Callable[..., Tables], seed: int) -> None:
    """Also what a member could have meant: numbers may be wrong then, but nothing ends and nobody waits."""
    stage, draw = tables(seed), random.Random(seed)
    for _ in range(300):
        stage.peers[0].member._link.ready.append(forged(stage, draw))
        stage.turn(0)
    for worker in range(WORKERS):
        stage.send(worker)
    stage.settle()
    for worker in range(WORKERS):
        assert not stage.claimed[worker]


@pytest.mark.parametrize(
    ("change", "payload"),
    [
        ({"k": TUPLES}, bytes(4 * PLACES)),
        ({"k": -1}, bytes(4 * PLACES)),
        ({"w": float("nan")}, bytes(4 * PLACES)),
        ({"w": -1.0}, bytes(4 * PLACES)),
        ({"w": 1e300}, bytes(4 * PLACES)),
        ({}, bytes(4 * PLACES - 4)),
        ({}, bytes(4 * PLACES + 4)),
        ({}, b""),
        ({}, None),
    ],
    ids=["no such tuple", "below zero", "weight", "negative", "huge", "short", "long", "empty", "none"],
)
def test_an_update_that_does_not_fit_is_refused(tables: Callable[..., Tables], change: Any, payload: Any) -> None:
    stage = tables(0)
    member = stage.peers[0].member
    header = {"t": "update", "g": member.rounds.generation, "a": 0, "k": 0, "n": 0, "w": 1.0, "rates": None} | change
    message = Message(1, header, None if payload is None else memoryview(bytearray(payload)))
    member._link.ready.append(message)
    stage.turn(0)
    assert member.rounds.refused == 1
    assert torch.equal(stage.table(), torch.zeros(TUPLES, PLACES))


def test_a_worker_that_was_replaced_is_not_heard(tables: Callable[..., Tables]) -> None:
    stage = tables(0)
    member = stage.peers[0].member
    header = {"t": "update", "g": member.rounds.generation, "a": 7, "k": 0, "n": 0, "w": 1.0}
    member._link.ready.append(Message(1, header, memoryview(bytearray(4 * PLACES))))
    stage.turn(0)
    assert torch.equal(stage.table(), torch.zeros(TUPLES, PLACES))
