"""Agents' boxes and the tasks that visit them, without Spark: real sockets, and the functions that jobs run."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.forms import has_form

from thinwire.exchange.spark.box import boxes, machine, path_of
from thinwire.exchange.spark.link import SPARK, Offer, SparkLink, SparkWire
from thinwire.exchange.spark.shared_memory import SharedMemory
from thinwire.exchange.spark.sums import Gathering
from thinwire.exchange.spark.tasks import Members, carry_mail, read_parts, sum_parts
from thinwire.protocol.messages import COORDINATOR, FROM_SPARK
from thinwire.rules.compression import codec

NOBODY = Members(0, {})
LONG = 40_000
"""Numbers that are more bytes than travel through a socket."""


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> SparkWire:
    monkeypatch.setattr("thinwire.exchange.spark.tasks.GRACE_S", 5.0)  # all have answered long before
    return SparkWire(secrets.token_hex(6), secrets.token_hex(8))


@pytest.fixture
def links(wire: SparkWire) -> Iterator[list[SparkLink]]:
    made = [wire.link(0, 1), wire.link(1, 7)]
    yield made
    for link in made:
        link._outbox.clear()
        link.close()
    assert not os.path.exists(path_of(wire.place)), "nothing is left behind"


def visit(
    wire: SparkWire,
    bags: dict[str, Any] | None = None,
    frames: list[Any] | None = None,
    members: Members = NOBODY,
    wait_s: float = 0.05,
) -> tuple[dict[str, Any], list[bytes]]:
    """What a visit finds: the boxes, and the frames in order."""
    where = machine(wire.place)
    assert where is not None
    rows = carry_mail(wire, where, bags or {}, frames or [], wait_s, members, iter([0]))
    header, data = json.loads(rows[0]), b"".join(rows[1:])
    found, start = [], 0
    for size in header["sizes"]:
        found.append(data[start : start + size])
        start += size
    return header["boxes"], found


def launched(key: str, weight: float, generation: int = 3, packing: str = "float32") -> dict[str, Any]:
    return {
        "t": "launched",
        "g": generation,
        "a": 1,
        "r": key,
        "s": [0, LONG],
        "k": packing,
        "c": 0,
        "w": weight,
        "n": {},
    }


def test_letters_are_handed_out_until_they_are_acknowledged(wire: SparkWire, links: list[SparkLink]) -> None:
    links[0].send(COORDINATOR, {"t": "join"})
    links[0].send(1, {"t": "state"}, memoryview(b"some"))
    for _ in range(2):
        told, frames = visit(wire)
        assert [letter[:3] for letter in told["0.1"]["letters"]] == [[1, -1, {"t": "join"}], [2, 1, {"t": "state"}]]
        assert frames == [b"some"]
    told, _ = visit(wire, {"0.1": {"letters": [], "ack": 1}})
    assert [letter[0] for letter in told["0.1"]["letters"]] == [2]
    assert visit(wire, {"0.1": {"letters": [], "ack": 2}})[0]["0.1"]["letters"] == []


@pytest.mark.parametrize("size", [10, 4 * LONG])
def test_a_letter_is_delivered_once_however_often_it_is_brought(
    wire: SparkWire, links: list[SparkLink], size: int
) -> None:
    data = os.urandom(size)
    bag = {"0.1": {"letters": [(1, SPARK, {"t": "sum"}, 0), (2, COORDINATOR, {"t": "pong"}, None)], "ack": 0}}
    for _ in range(2):
        assert visit(wire, bag, [data])[0]["0.1"]["seen"] == 2
    found = links[0].receive(0.1)
    assert [(m.sender, m.header["t"]) for m in found] == [(SPARK, "sum"), (COORDINATOR, "pong")]
    assert bytes(found[0].payload or b"") == data
    assert links[1].receive(0.0) == []


def test_contributions_of_one_machine_come_back_added_up(wire: SparkWire, links: list[SparkLink]) -> None:
    one, other = np.arange(LONG, dtype=np.float32), np.ones(LONG, np.float32)
    links[0].send(COORDINATOR, launched("train:4", 1.0), one.data)
    links[1].send(COORDINATOR, launched("train:4", 3.0), other.data)
    told, frames = visit(wire)
    assert len(frames) == 1
    assert np.array_equal(np.frombuffer(frames[0], np.float32), one + 3 * other)
    assert [told[name]["letters"][0][3] for name in ("0.1", "1.7")] == [0, None]


def test_packed_contributions_and_those_of_other_rounds_stay_apart(wire: SparkWire, links: list[SparkLink]) -> None:
    values = np.ones(LONG, np.float32)
    packed = memoryview(bytes(codec("int8").size_bytes(LONG)))
    links[0].send(COORDINATOR, launched("train:4", 1.0, packing="int8"), packed)
    links[1].send(COORDINATOR, launched("train:4", 1.0, packing="int8"), packed)
    links[0].send(COORDINATOR, launched("train:5", 1.0), values.data)
    links[1].send(COORDINATOR, launched("train:6", 1.0), values.data)
    told, frames = visit(wire)
    assert [len(frame) for frame in frames] == [packed.nbytes, 4 * LONG, packed.nbytes, 4 * LONG]
    assert [letter[3] for name in ("0.1", "1.7") for letter in told[name]["letters"]] == [0, 1, 2, 3]


def test_a_round_whose_members_are_all_here_is_settled_here(wire: SparkWire, links: list[SparkLink]) -> None:
    members = Members(3, {"0.1": 0, "1.7": 1})
    links[0].send(COORDINATOR, launched("train:4", 1.0) | {"n": {"rows": 5}}, np.full(LONG, 2, np.float32).data)
    links[1].send(COORDINATOR, launched("train:4", 3.0), np.full(LONG, 6, np.float32).data)
    told, frames = visit(wire, members=members)
    assert frames == []
    assert [told[name]["letters"][0][2]["t"] for name in ("0.1", "1.7")] == ["settled", "settled"]
    for link in links:
        (found,) = link.receive(0.1)
        assert found.sender == SPARK
        assert found.header["t"] == "sum"
        assert has_form(FROM_SPARK, found.header), "a worker refuses what has another form"
        assert found.header["n"] == {"0": {"rows": 5}, "1": {}}
        assert found.payload is not None
        assert np.array_equal(np.frombuffer(found.payload, np.float32), np.full(LONG, 5, np.float32))
    again, _ = visit(wire, members=members)
    assert again["0.1"]["letters"][0][2]["t"] == "settled", "nobody has acknowledged it: the next visit does the same"


@pytest.mark.parametrize("packing", ["float32", "int8", "bfloat16", "sign1", "sign2"])
@pytest.mark.parametrize("at_home", [True, False])
def test_a_contribution_that_is_not_finite_is_left_out_on_its_machine_and_told(
    wire: SparkWire, links: list[SparkLink], packing: str, at_home: bool
) -> None:
    members = Members(3, {"0.1": 0, "1.7": 1}) if at_home else NOBODY
    flawed = torch.ones(LONG)
    flawed[7] = float("nan")
    for link, values in zip(links, (flawed, torch.full((LONG,), 6.0)), strict=True):
        packed = memoryview(bytearray(codec(packing).encode(values).numpy().tobytes()))
        link.send(COORDINATOR, launched("train:4", 1.0, packing=packing), packed)
    told, frames = visit(wire, members=members)
    mine, other = (told[name]["letters"][0] for name in ("0.1", "1.7"))
    assert mine[2]["x"] == (256 if codec(packing).bits <= 8 else 1)
    assert mine[3] is None
    assert "x" not in other[2]
    if at_home and packing == "float32":
        (found,) = links[1].receive(0.1)
        assert found.header["x"] == [0]
        assert np.array_equal(np.frombuffer(found.payload, np.float32), np.full(LONG, 6, np.float32))
    else:
        assert mine[2]["w"] == 0.0
        assert len(frames) == 1
        given = torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
        assert torch.allclose(codec(packing).decode(given, LONG), torch.full((LONG,), 6.0), atol=0.1)


@pytest.mark.parametrize("members", [Members(4, {"0.1": 0, "1.7": 1}), Members(3, {"0.1": 0, "1.7": 1, "2.0": 2})])
def test_a_round_of_another_generation_or_with_members_elsewhere_is_not(
    wire: SparkWire, links: list[SparkLink], members: Members
) -> None:
    for link in links:
        link.send(COORDINATOR, launched("train:4", 1.0), np.ones(LONG, np.float32).data)
    told, frames = visit(wire, members=members)
    assert told["0.1"]["letters"][0][2]["t"] == "launched"
    assert len(frames) == 1
    assert all(link.receive(0.0) == [] for link in links)


def test_the_box_of_an_agent_that_is_gone_is_taken_away(wire: SparkWire, links: list[SparkLink]) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(os.path.join(path_of(wire.place), "2.0.box"))
    left.close()  # as when its process is killed: the name stays
    told, _ = visit(wire)
    assert told["2.0"] == {"gone": True}
    assert list(boxes(wire.place)) == ["0.1", "1.7"]


def test_a_visitor_with_another_run_s_token_gets_nothing(wire: SparkWire, links: list[SparkLink]) -> None:
    links[0].send(COORDINATOR, {"t": "secret"})
    told, frames = visit(SparkWire(wire.run, "another"))
    assert told == {}
    assert frames == []


def test_a_task_on_another_machine_says_so(wire: SparkWire, links: list[SparkLink]) -> None:
    assert json.loads(carry_mail(wire, "elsewhere:1:2", {}, [], 0.0, NOBODY, iter([]))[0]) == {"elsewhere": True}


def test_offers_are_read_once_a_job_and_averaged_by_slice(wire: SparkWire, links: list[SparkLink]) -> None:
    import torch

    links[0].offer("train:1", Offer(2, 1.0, torch.full((10,), 2.0)))
    links[1].offer("train:1", Offer(2, 3.0, torch.full((10,), 6.0)))
    names = ["0.1", "1.7"]
    rows = list(read_parts(wire, "job", "train:1", 2, names, 10, 3, iter([0])))
    assert list(read_parts(wire, "job", "train:1", 2, names, 10, 3, iter([0]))) == [], "the machine's other task"
    found = sorted(sum_parts(iter(rows)))
    assert np.array_equal(np.frombuffer(b"".join(row[1] for row in found), np.float32), np.full(10, 5, np.float32))
    assert all(sorted(row[2]) == names for row in found)
    assert list(read_parts(wire, "other", "train:1", 9, names, 10, 3, iter([0]))) == [], "another generation's"


def test_a_sheet_is_shared_and_what_a_reader_writes_is_its_own() -> None:
    sheet = SharedMemory.of(b"\x01" * 100_000)
    if isinstance(sheet, bytes):
        pytest.skip("this system has no memory without a name")
    one, other = sheet.read(), sheet.read()
    one[0] = 9
    assert other[0] == 1
    with pytest.raises(ValueError, match="where 5 were announced"):
        SharedMemory.received(os.dup(sheet.descriptor), 5)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "sign2", "sign1"])
@pytest.mark.parametrize("values", [3.4e38, float("inf"), float("nan"), 1.0])
def test_a_mean_is_finite_as_it_is_packed_or_there_is_none(name: str, values: float) -> None:
    """What is finite in 32 bits may be infinite in the 16 that a mean travels in."""
    gathered = Gathering((0, 8), codec(name), total=torch.full((8,), values), weights={0: 1.0})
    mean = gathered.mean()
    if mean is None:
        assert values != 1.0
        assert values != 3.4e38 or name != "float32"
    else:
        packing = codec(gathered.packing)
        assert packing.decode(torch.from_numpy(mean).view(torch.uint8), 8).isfinite().all()
