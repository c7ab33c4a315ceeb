"""A mean is of finite numbers: at its owner whatever a peer sends, and at everyone who takes it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinwire.exchange.round import Launch
from thinwire.exchange.signals import Broken, LeftOut
from thinwire.parameters import Fragment
from thinwire.protocol.messages import Message
from thinwire.rules.compression import CODECS, codec

from .stage import Stage
from .test_table import PLACES, TUPLES, Tables, part, tables

__all__ = ["tables"]
SIZE, WORKERS = 1500, 3


def told(net: Any) -> list[tuple[int, str, str, int]]:
    """What the machines tell of numbers that are not finite, in one list."""
    found: list[tuple[int, str, str, int]] = []
    for machine in net.machines.values():
        machine._summing._tell = lambda worker, key, what, values: found.append((worker, key, what, values))
    return found


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("flaw", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("resend", [False, True])
def test_a_part_that_is_not_finite_is_left_out_and_told(mesh: Any, name: str, flaw: float, resend: bool) -> None:
    """3e38 is past what the codecs in blocks carry; in the others it is a number like any other."""
    net = mesh(range(WORKERS), size=SIZE, resend=resend)
    found = told(net)
    bad = torch.ones(SIZE)
    bad[0] = flaw  # in the chunk of worker 0, which is summed by itself
    net.launch(0, "train:0", torch.full((SIZE,), 3.0), codec_name=name)
    net.launch(1, "train:0", bad, codec_name=name)
    net.launch(2, "train:0", torch.full((SIZE,), 5.0), codec_name=name)
    net.run()
    mean = net.mean("train:0")
    assert mean.isfinite().all()
    counts = flaw < 1e38 or codec(name).bits > 8
    if flaw == 3e38 and counts:
        return
    assert found[0][:3] == (1, "train:0", "contribution")
    assert len(found) == 1
    assert found[0][3] == (1 if name in ("float32", "bfloat16") else 256), "a block has one header"
    start, stop = net.chunks("train:0")[0]
    assert torch.allclose(mean[start:stop], torch.full((stop - start,), 4.0), atol=0.05), "of the two others"
    assert torch.allclose(mean[stop:], torch.full((SIZE - stop,), 3.0), atol=0.05), "of all three"
    assert all(net.landed[worker]["train:0"].dropped == (1,) for worker in range(WORKERS))
    assert not any(net.landed[worker]["train:0"].empty for worker in range(WORKERS))
    for residuals in (net.residual, net.owner_residual):
        assert all(values.isfinite().all() for values in residuals.values()), "nothing stays poisoned"


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_a_round_to_which_nobody_gives_anything_finite_is_empty(mesh: Any, name: str) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    found = told(net)
    for worker in range(WORKERS):
        net.launch(worker, "train:0", torch.full((SIZE,), float("nan")), codec_name=name)
    net.run()
    assert net.mean("train:0").eq(0).all()
    assert all(net.landed[worker]["train:0"].empty for worker in range(WORKERS))
    assert {worker for worker, _, _, _ in found} == set(range(WORKERS))


def test_parts_that_are_finite_and_too_large_together_are_all_left_out(mesh: Any) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    found = told(net)
    for worker in range(WORKERS):
        net.launch(worker, "train:0", torch.full((SIZE,), 3e38))
    net.run()
    assert net.mean("train:0").eq(0).all()
    assert {worker for worker, _, _, _ in found} == set(range(WORKERS))


def test_the_next_round_has_all_again(mesh: Any) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    for round, values in enumerate((float("nan"), 2.0)):
        for worker in range(WORKERS):
            given = values if worker == 1 else 2.0
            net.launch(worker, f"train:{round}", torch.full((SIZE,), given), codec_name="int4")
        net.run()
    assert torch.allclose(net.mean("train:1"), torch.full((SIZE,), 2.0), atol=0.2)


def test_infinities_that_are_meant_stay_in_means_of_buffers(mesh: Any) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    values = torch.zeros(SIZE)
    values[7] = float("-inf")
    for worker in range(WORKERS):
        net.launch(worker, "buffers:1", values)
    net.run()
    assert net.mean("buffers:1")[7] == float("-inf")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_sum_that_is_not_finite_is_refused_by_whoever_takes_it_up(mesh: Any, name: str) -> None:
    net = mesh(range(WORKERS), size=SIZE)
    found = told(net)
    for worker in range(WORKERS):
        net.launch(worker, "train:0", torch.ones(SIZE), codec_name=name)
    while not any(header["t"] == "sum" for header, _ in net.links[1, 0]):
        net.deliver(next(pair for pair, queue in sorted(net.links.items()) if queue and pair[1] == 1))
    at = next(i for i, (header, _) in enumerate(net.links[1, 0]) if header["t"] == "sum")
    header, _ = net.links[1, 0][at]
    size = net.machines[0].ledger.find("train:0").cut.size(header["c"])
    lie = codec(name).encode(torch.full((size,), float("nan")))
    net.links[1, 0][at] = (header, memoryview(bytearray(lie.numpy().tobytes())))
    net.run()
    assert "train:0" not in net.landed[0], "worker 0 waits: the round is launched again"
    assert net.machines[0].refused == 1
    assert found == [(1, "train:0", "mean", 0)]


def test_a_server_leaves_an_update_out_that_is_not_finite_and_answers_it(tables: Callable[..., Tables]) -> None:
    stage = tables(0)
    member = stage.peers[0].member
    lie = torch.full((PLACES,), float("inf")).numpy().tobytes()
    key = min(part(stage.peers[0]).server.books)
    header = {"t": "update", "g": member.rounds.generation, "a": 0, "k": key, "n": 0, "w": 1.0, "rates": []}
    header |= {"absent": [], "over": False}
    member._link.ready.append(Message(1, header, memoryview(bytearray(lie))))
    stage.turn(0)
    assert torch.equal(stage.table(), torch.zeros(TUPLES, PLACES))
    sent = [message.header for wire in stage.wires.values() for message in wire]
    (event,) = [header["fields"] for header in sent if header["t"] == "event"]
    assert event == {"worker": 1, "what": "contribution", "values": PLACES, "round": "table:0", "by": 0}
    assert [header["n"] for header in sent if header["t"] == "reply"] == [0], "whoever sent it does not wait for ever"


def test_a_worker_sends_servers_no_parameters_that_are_not_finite(tables: Callable[..., Tables]) -> None:
    stage = tables(0)
    peer = stage.peers[1]
    round, fragment = peer.claim()
    values = torch.zeros(TUPLES * PLACES)
    values[3] = float("nan")
    peer.launch(round, fragment, values, 1.0, {})
    stage.settle()
    assert torch.equal(stage.table(), torch.zeros(TUPLES, PLACES))
    assert stage.peers[1].next_round == round + 1


def test_what_is_to_be_sent_is_looked_at_where_it_is_computed() -> None:
    from thinwire.strategies import SparkNet

    stage = Stage(2, SparkNet())
    member = stage.peers[1].member
    flawed = torch.zeros(stage.size)
    flawed[5] = float("nan")
    launched: list[Launch] = []
    member.rounds.launch = launched.append  # type: ignore[method-assign]
    member.training.launching.launch(0, Fragment(0, stage.size), flawed, 1.0, {"rows": 3})
    signals = []
    while not member.signals.empty():
        signals.append(member.signals.get_nowait())
    assert LeftOut(0, 1, False) in signals
    assert not any(isinstance(signal, Broken) for signal in signals)
    assert [(launch.values, launch.weight, launch.note) for launch in launched] == [(None, 0.0, {"rows": 3})]
