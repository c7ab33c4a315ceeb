"""Rounds and nonsense: what a peer must not send is refused or passed over, never raised, and never in a mean."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

SIZE, WORKERS = 1500, 3
HUGE = 10**400

# Each is a change to a true "part" from worker 1 to worker 0; None as a value takes the key away.
MALFORMED_PARTS: dict[str, dict[str, Any]] = {
    "a chunk past the last": {"c": 99},
    "a chunk before the first": {"c": -1},
    "a chunk of another owner": {"c": 1},
    "a chunk that is text": {"c": "first"},
    "a chunk that is a list": {"c": [0]},
    "an infinite chunk": {"c": math.inf},
    "a negative weight": {"w": -1.0},
    "a weight that is not a number": {"w": math.nan},
    "an infinite weight": {"w": math.inf},
    "a weight past float32": {"w": 1e39},
    "a weight past every float": {"w": HUGE},
    "a weight that is text": {"w": "much"},
    "no weight": {"w": None},
    "no generation": {"g": None},
    "an infinite generation": {"g": math.inf},
    "a generation that is text": {"g": "now"},
    "an older generation": {"g": 0},
    "a newer generation": {"g": 999},
    "another attempt": {"a": 5},
    "no attempt": {"a": None},
    "no key": {"r": None},
    "a key of a strange round": {"r": "train:many"},
    "no fragment": {"s": None},
    "half a fragment": {"s": [0]},
    "a fragment of three": {"s": [0, 1, 2]},
    "a fragment that ends before it starts": {"s": [SIZE, 0]},
    "a fragment before the model": {"s": [-256, SIZE]},
    "a fragment past the model": {"s": [0, SIZE + 256]},
    "a fragment past all memory": {"s": [0, 2 * 10**11]},
    "a fragment that is no number": {"s": [0, math.nan]},
    "an infinite fragment": {"s": [0, math.inf]},
    "another fragment": {"s": [256, SIZE]},
    "an unknown codec": {"k": "int3"},
    "another codec": {"k": "bfloat16"},
    "a codec that is a list": {"k": ["float32"]},
    "no codec": {"k": None},
    "no kind": {"t": None},
    "an unknown kind": {"t": "gift"},
    "a note that is text": {"n": "hello"},
    "a note that is a number": {"n": 3},
    "a short payload": {"payload": b"\0" * 12},
    "no payload": {"payload": None},
    "a long payload": {"payload": b"\0" * (4 * SIZE)},
}
MALFORMED_SUMS: dict[str, dict[str, Any]] = {
    "of a chunk the sender does not own": {"c": 2},
    "with no list of those counted": {"i": None},
    "with a number for those counted": {"i": 3},
    "with text for those counted": {"i": ["one"]},
    "with a note that is text": {"n": "hello"},
    "with a note that is a list": {"n": [1, 2]},
    "with notes under names": {"n": {"one": {}}},
    "with notes that are numbers": {"n": {"1": 5}},
    "with a short payload": {"payload": b"\0" * 12},
    "with no payload": {"payload": None},
}


def true_messages(mesh: Any, name: str) -> tuple[tuple[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]:
    """A part and a sum that worker 1 sends worker 0 in a round like the one under test."""
    net = mesh(range(WORKERS), size=SIZE)
    for worker in range(WORKERS):
        net.launch(worker, "train:0", torch.ones(SIZE), codec_name=name)
    header, payload = net.links[1, 0][0]
    part = (header, bytes(payload))
    while not any(h["t"] == "sum" for h, _ in net.links[1, 0]):
        net.deliver(next(pair for pair, queue in sorted(net.links.items()) if queue and pair[1] == 1))
    header, payload = next((h, p) for h, p in net.links[1, 0] if h["t"] == "sum")
    return part, (header, bytes(payload))


def changed(message: tuple[dict[str, Any], bytes], change: dict[str, Any]) -> tuple[dict[str, Any], memoryview | None]:
    header, payload = dict(message[0]), message[1]
    for key, value in change.items():
        if key == "payload":
            payload = value
        elif value is None:
            header.pop(key, None)
        else:
            header[key] = value
    return json.loads(json.dumps(header)), None if payload is None else memoryview(bytearray(payload))


def check_round(net: Any, name: str, launch_first: bool, inject: Any) -> None:
    values = [torch.full((SIZE,), float(w + 1)) for w in range(WORKERS)]
    if not launch_first:
        inject()
    net.launch(0, "train:0", values[0], codec_name=name)
    if launch_first:
        inject()
    for worker in (1, 2):
        net.launch(worker, "train:0", values[worker], codec_name=name)
        net.run(2)
        inject()
    net.run()
    assert torch.allclose(net.mean("train:0"), torch.full((SIZE,), 2.0), atol=1e-2)


@pytest.mark.parametrize("name", ["float32", "int4"])
@pytest.mark.parametrize("launch_first", [True, False], ids=["after the launch", "before it"])
@pytest.mark.parametrize("what", MALFORMED_PARTS)
def test_a_malformed_part_harms_no_round(mesh: Any, what: str, launch_first: bool, name: str) -> None:
    change = MALFORMED_PARTS[what]
    if change.get("k") == name:
        pytest.skip("is this round's codec")
    part, _ = true_messages(mesh, name)
    net = mesh(range(WORKERS), size=SIZE)
    check_round(net, name, launch_first, lambda: net.inject(1, 0, *changed(part, change)))


@pytest.mark.parametrize("launch_first", [True, False], ids=["after the launch", "before it"])
@pytest.mark.parametrize("what", MALFORMED_SUMS)
def test_a_malformed_sum_harms_no_round(mesh: Any, what: str, launch_first: bool) -> None:
    _, total = true_messages(mesh, "float32")
    net = mesh(range(WORKERS), size=SIZE)

    def inject() -> None:
        if "train:0" not in net.landed[0]:
            net.inject(1, 0, *changed(total, MALFORMED_SUMS[what]))

    check_round(net, "float32", launch_first, inject)


@pytest.mark.parametrize("attempt", [None, 0, 3])
def test_a_stranger_is_not_counted(mesh: Any, attempt: int | None) -> None:
    """A worker that is not of the generation, with and without an attempt of its own."""
    part, _ = true_messages(mesh, "float32")
    net = mesh(range(WORKERS), size=SIZE)
    change = {"a": attempt, "w": 1000.0}
    check_round(net, "float32", True, lambda: net.inject(7, 0, *changed(part, change)))


@pytest.mark.parametrize("value", [None, 3, [1], "text"])
def test_a_header_that_is_no_object_is_not_raised(mesh: Any, value: Any) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    check_round(net, "float32", True, lambda: net.inject(1, 0, value))


def test_rounds_that_nobody_runs_do_not_keep_this_worker_from_launching_its_own(mesh: Any) -> None:
    part, _ = true_messages(mesh, "float32")
    net = mesh(range(WORKERS), size=SIZE)
    for number in range(1000, 1100):
        net.inject(1, 0, *changed(part, {"r": f"train:{number}"}))
    check_round(net, "float32", True, lambda: None)


@pytest.mark.parametrize("block", range(4))
def test_a_storm_of_nonsense_changes_no_mean(mesh: Any, block: int) -> None:
    """Random changes, random moments; only those that a machine can tell from the truth."""
    strange = [None, -1, 3.5, "x", [], {}, [[]], True, HUGE, math.inf, math.nan, 2**62, -(10**12)]
    for seed in range(block * 15, block * 15 + 15):
        rng = random.Random(seed)
        net = mesh(range(WORKERS), seed, size=SIZE)
        part, total = true_messages(mesh, "float32")
        values = [torch.randn(SIZE, generator=torch.Generator().manual_seed(seed + w)) for w in range(WORKERS)]
        net.launch(0, "train:0", values[0])
        for worker in (1, 2):
            net.launch(worker, "train:0", values[worker])
            for _ in range(rng.randint(1, 12)):
                net.run(rng.randint(0, 1))
                message = rng.choice((part, total))
                keys = rng.sample(["g", "a", "r", "s", "k", "c", "t"], rng.randint(1, 3))
                change = {key: rng.choice(strange) for key in keys} | {"payload": b"\0" * rng.randint(0, 3)}
                net.inject(rng.choice((1, 2, 9)), 0, *changed(message, change))
        net.run()
        expected = torch.zeros(SIZE)
        for value in values:
            expected.add_(value)
        assert torch.equal(net.mean("train:0"), expected.div_(WORKERS)), f"with seed {seed}"


@pytest.mark.parametrize("name", ["float32", "int8"])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_said_before_is_heard_once(mesh: Any, name: str, seed: int) -> None:
    """True messages come again and again: in their own round, in later ones, and in the next generation."""
    net, draw, said = mesh(range(WORKERS), seed, size=SIZE), random.Random(seed), []
    for round in range(4):
        if round == 2:
            assert not any(net.form(range(WORKERS)).values())
        for worker in range(WORKERS):
            net.launch(worker, f"train:{round}", torch.full((SIZE,), float(worker + 1 + round)), codec_name=name)
        while ready := sorted(link for link, queue in net.links.items() if queue):
            link = draw.choice(ready)
            header, payload = net.links[link][0]
            said.append((*link, header, None if payload is None else bytes(payload)))
            net.deliver(link)
            for sender, receiver, header, data in draw.sample(said, min(5, len(said))):
                net.inject(sender, receiver, dict(header), None if data is None else memoryview(bytearray(data)))
        assert torch.allclose(net.mean(f"train:{round}"), torch.full((SIZE,), 2.0 + round), atol=0.05)
