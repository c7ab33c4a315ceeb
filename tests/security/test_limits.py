"""Every length and count that comes from outside has a limit, and what is past it is refused, not believed."""

from __future__ import annotations

import gzip
import json
import math
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from tests.forms import has_form
from tests.unit.test_coordinator import PROGRESS, Script
from thinwire import events, recipe
from thinwire.checkpoint import CheckpointStore, Manifest, store
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.data import builtin, open_source
from thinwire.data.feeds import PIECE_BYTES as FEED_BYTES
from thinwire.data.feeds import Server
from thinwire.data.split import ShardFiles
from thinwire.errors import CheckpointError, ConfigError, DataError, ProtocolError
from thinwire.exchange.spark import box
from thinwire.exchange.spark.sums import LONGEST, is_possible
from thinwire.protocol import chunks as parcel
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.messages import MOST_PIECES, TO_COORDINATOR, Message
from thinwire.transport.zmq import (
    HUB_PIECE_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PIECE_BYTES,
    Keys,
    ZmqHub,
    ZmqLink,
    _header_frames,
)

from .surroundings import poll

HUGE = 10**9
TRUE: dict[str, dict[str, Any]] = {
    "join": {"address": "memory:0.0", "host": "here", "pid": 1, "rows": 8, "meets": None},
    "fetch": {"name": "train", "i": 0},
    "beat": {"landed": 0, "bytes": 0, "received": 0, "refused": 0, "waiting": {"train:0": [1]}, "progress": PROGRESS},
    "prepared": {"g": 1, "landed": 0, "since": 0, "fresh": True, "digest": "d", "more": None},
    "evaluated": {"p": 1, "rows": 8, "steps": 1, "done": 8, "sums": {"val_loss": 1.0}, "weights": {"val_loss": 1.0}},
    "caught": {"published": 0},
    "saved": {"name": "000001-step-4", "steps": 4, "fails": False}
    | {"parts": [{"name": "joint", "size_bytes": 8, "digest": "0f"}]},
    "finished": {},
    "agreed": {},
    "epoch": {"epoch": 0, "rows": 8, "loss": 0.5},
    "event": {
        "kind": "rejoined",
        "fields": {"worker": 0, "attempt": 0, "generation": 1, "landed": 3, "digest": "d"},
    },
    "failed": {"kind": "ValueError", "error": "x", "traceback": "y"},
    "result": {"part": 0, "chunk": 0, "chunks": 1, "i": 0, "n": 1},
    "shown": {"part": 0, "chunk": 0, "chunks": 1, "i": 0, "n": 1, "p": 1},
    "apart": {"n": 1, "why": "x"},
    "bye": {},
}
NONSENSE: tuple[Any, ...] = (None, -1, 2**60, 10**400, math.inf, "much", [], {}, {"a": [None]}, [[["x"]]], True, 0.5)


@pytest.fixture
def ends() -> Iterator[tuple[ZmqHub, Any]]:
    """A hub, and a raw socket with the run's keys: a peer that says what it likes."""
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.linger, peer.identity = 0, b"0.0"
    peer.curve_publickey, peer.curve_secretkey = keys.client_public, keys.client_secret
    peer.curve_serverkey = keys.server_public
    peer.connect(hub.address)
    yield hub, peer
    peer.close()
    hub.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b'{"t":"beat","a":0,"x":"' + b"y" * MAX_HEADER_BYTES + b'"}'],
        [b"[" * 200_000],
        [b'{"t":"beat","a":0,"x":' + b'{"y":' * 100_000],
        [b'{"t":"beat","a":' + b"9" * 5000 + b"}"],
        [b'{"t":"beat","a":[]}'],
        [b'{"t":"beat","a":0.5}'],
        [b'{"t":7,"a":0}'],
        [b'"beat"'],
        [b""],
        [b'{"t":"beat"}', b"", b""],
        [b'{"t":"beat"}'] * 100,
        [b"\xff\xfe\0"],
    ],
    ids=range(12),
)
def test_a_header_past_its_limits_is_counted_and_the_next_message_is_heard(ends: Any, frames: list[bytes]) -> None:
    hub, peer = ends
    cut = [_header_frames(frames[0], HUB_PIECE_BYTES), frames[1:]]
    peer.send_multipart([frame for each in cut for frame in each])
    peer.send(b'{"t":"beat","a":0}')
    heard: list[Message] = []
    poll(lambda: bool(heard.extend(hub.receive(0.05)) or heard))
    assert [message.header for message in heard] == [{"t": "beat", "a": 0}]
    assert hub.refused == 1


def test_a_frame_past_its_limit_ends_the_connection_before_it_is_in_memory(ends: Any) -> None:
    hub, peer = ends
    peer.send_multipart([b'{"t":"beat","a":0}', b"\0" * (64 << 10)])
    heard: list[Message] = []

    def let_in_again() -> bool:
        peer.send(b'{"t":"beat","a":1}')
        heard.extend(hub.receive(0.05))
        return any(message.header["a"] == 1 for message in heard)

    poll(let_in_again)
    assert all(message.payload is None for message in heard)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x02" + b"{" * (HUB_PIECE_BYTES - 1)],
        [b"\x00{}"],
        [b'\x02{"t":"beat"}', b"}"],
        [b'{"t":"beat"}', b"\0" * HUB_PIECE_BYTES, b""],
        [b'{"t":"beat"}', b"\0" * HUB_PIECE_BYTES, b"\0" * (HUB_PIECE_BYTES + 1)],
        [b'{"t":"beat"}', b"\0", b"\0" * HUB_PIECE_BYTES],
        [b'{"t":"beat"}', *[b"\0" * HUB_PIECE_BYTES] * (MAX_PAYLOAD_BYTES // HUB_PIECE_BYTES + 1)],
    ],
    ids=range(7),
)
def test_what_was_not_cut_as_the_wire_cuts_is_refused(ends: Any, frames: list[bytes]) -> None:
    hub, peer = ends
    peer.send_multipart(frames)
    poll(lambda: bool(hub.receive(0.05)) or hub.refused == 1)
    assert hub.refused == 1


@pytest.mark.parametrize("size", [0, 1, HUB_PIECE_BYTES, HUB_PIECE_BYTES + 1, PIECE_BYTES + 1, 4 << 20])
def test_headers_and_payloads_of_any_length_arrive_both_ways(size: int) -> None:
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=3, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    payload = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    header = {"t": "saved", "a": 0, "text": "x" * min(size, 900_000)}
    came: list[Message] = []
    try:
        link.send(-1, header, payload)
        poll(lambda: came.extend(hub.receive(0.05)) or len(came) == 1)
        hub.send(3, 0, header, payload)
        poll(lambda: came.extend(link.receive(0.05)) or len(came) == 2)
        assert [(m.sender, m.header, m.payload) for m in came] == [(3, header, payload), (-1, header, payload)]
    finally:
        link.close()
        hub.close()


def test_the_forms_are_those_of_true_messages_and_of_no_others() -> None:
    assert set(TO_COORDINATOR) == set(TRUE)
    for kind, fields in TRUE.items():
        header = {"t": kind, "a": 0, **fields}
        assert has_form(TO_COORDINATOR, header), kind
        for name in ("a", *fields):
            optional = (kind, name) in {("join", n) for n in ("host", "pid", "rows", "meets")} | {("prepared", "more")}
            without = {key: value for key, value in header.items() if key != name}
            assert has_form(TO_COORDINATOR, without) == optional, (kind, name)


class Liar(Script):
    """A worker that says every message of another form, and then does what it should."""

    def __init__(self) -> None:
        super().__init__(farewell_s=0.0)
        self.lies = 0
        for kind, fields in TRUE.items():
            for name in ("a", *fields):
                for value in NONSENSE:
                    header = {"t": kind, "a": 0, **fields, name: value}
                    if not has_form(TO_COORDINATOR, header):
                        self.lies += 1
                        self.inbox.append(Message(0, header, memoryview(b"x")))
        for header in ({"t": "gift", "a": 0}, {"t": "event", "a": 0, "kind": "rejoined", "fields": {"no": 1}}):
            self.inbox.append(Message(0, header, None))
        self.inbox += [Message(-5, {"t": "fetch", "a": 0, "name": "../../etc/passwd", "i": 0}, None)]

    def receive(self, timeout_s: float) -> list[Message]:
        self.moment -= 0.0999
        return super().receive(timeout_s)


def test_a_worker_that_says_nonsense_is_refused_message_by_message_and_the_run_completes() -> None:
    script = Liar()
    log: list[events.Event] = []
    policy = Policy(1, deadlines=Deadlines(settle_s=0.0), min_workers=0)
    outcome = Coordinator(script, script, policy, emit=log.append, time=script).run()
    assert script.lies > 300
    assert outcome.refused > script.lies
    assert outcome.workers_lost == 0
    assert outcome.reason == "all rows done"


@pytest.mark.parametrize(
    "changes",
    [{"n": HUGE}, {"chunks": HUGE}, {"i": 5}, {"chunk": 5}, {"i": MOST_PIECES, "n": MOST_PIECES}, {"n": 0}],
    ids=str,
)
def test_a_result_of_more_pieces_than_can_be_is_refused(changes: dict[str, int]) -> None:
    assert not has_form(TO_COORDINATOR, {"t": "result", "a": 0, **TRUE["result"], **changes})


@pytest.mark.parametrize(
    ("index", "count", "size"),
    [(0, HUGE, 1), (-1, 4, 1), (4, 4, 1), (0, 0, 1), (HUGE, HUGE + 1, 1), (0, 2, parcel.PIECE_BYTES + 1)],
)
def test_a_joint_state_of_more_pieces_than_can_be_is_refused(index: int, count: int, size: int) -> None:
    with pytest.raises(ProtocolError, match=r"is not possible"):
        parcel.Reassembly().add(index, count, memoryview(bytes(size)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "train/../validation", "", "TRAIN", "validation"])
def test_a_worker_can_fetch_its_own_files_by_name_and_no_other(tmp_path: Path, name: str) -> None:
    (tmp_path / "0").write_bytes(b"rows of worker 0")
    server = Server([ShardFiles(str(tmp_path / "0"), None, 1, 0)])
    assert server.piece(0, "train", 0) == (b"rows of worker 0", 1)
    assert server.piece(0, name, 0) == (b"", 0)


@pytest.mark.parametrize("index", [-1, HUGE])
def test_a_piece_that_is_not_there_is_empty(tmp_path: Path, index: int) -> None:
    (tmp_path / "0").write_bytes(b"x" * (FEED_BYTES + 1))
    assert Server([ShardFiles(str(tmp_path / "0"), None, 1, 0)]).piece(0, "train", index)[0] == b""


@pytest.mark.parametrize(
    "changes",
    [
        {"s": [0, LONGEST + 1]},
        {"s": [5, 5]},
        {"s": [-1, 4]},
        {"k": "zip"},
        {"w": math.inf},
        {"w": -1},
        {"w": "all"},
        {"n": []},
        {"payload": b"\0" * 8},
    ],
    ids=str,
)
def test_a_contribution_by_letter_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    header: dict[str, Any] = {"s": [0, 4], "k": "float32", "w": 1.0, "n": {}, "payload": b"\0" * 16}
    assert is_possible(header, (0, 4), memoryview(header["payload"]))
    header |= changes
    assert not is_possible(header, tuple(header["s"]), memoryview(header["payload"]))


def said_to_a_box(said: bytes) -> BaseException | None:
    """What a box makes of bytes that come to it."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(100.0)
    writing = threading.Thread(target=lambda: (ours.sendall(said), ours.close()))
    writing.start()
    try:
        box.receive(theirs)
    except Exception as error:
        return error
    finally:
        theirs.close()
        writing.join()
    return None


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<Q", 2**63),
        struct.pack("<Q", box.MOST_HEADER + 1),
        struct.pack("<Q", 20) + b"[" * 20,
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                json.dumps({"sizes": [[2**60, 0]]}).encode(),
                json.dumps({"sizes": [[-1, 0]]}).encode(),
                json.dumps({"sizes": [[box.MOST_FRAME, 0], [1, 0]]}).encode(),
                json.dumps({"sizes": [[70_000, 1]]}).encode(),
                json.dumps([]).encode(),
                b"[" * 100_000,
            )
        ),
    ],
    ids=range(9),
)
def test_lengths_that_a_visitor_announces_are_checked_before_memory_is_taken(said: bytes) -> None:
    assert said_to_a_box(said) is not None


def test_a_recipe_past_its_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_bytes(b"# " + b"x" * recipe.MOST_BYTES)
    with pytest.raises(ConfigError, match="at most 1048576"):
        recipe.load(str(path))


@pytest.mark.parametrize("text", [b"x = " + b"[" * 50_000, b"\xff\xfe", b"x = " + b"9" * 5000], ids=range(3))
def test_a_recipe_that_is_no_toml_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(text)
    with pytest.raises(ConfigError):
        recipe.load(str(tmp_path / "bad.toml"))


def test_a_manifest_past_its_size_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CheckpointStore(tmp_path)
    part = found.write_part("step-1", "joint", {"x": torch.zeros(4)})
    found.commit(Manifest("step-1", 1, (part,)))
    assert found.latest() is not None
    monkeypatch.setattr(store, "_MOST_MANIFEST_BYTES", 16)
    assert found.latest() is None
    with pytest.raises(CheckpointError, match="at most 16"):
        found.load("step-1")


def test_a_part_as_long_as_its_manifest_does_not_say_is_not_read(tmp_path: Path) -> None:
    found = CheckpointStore(tmp_path)
    part = found.write_part("step-1", "joint", {"x": torch.zeros(4)})
    found.commit(Manifest("step-1", 1, (part,)))
    with open(tmp_path / "step-1" / part.file_name, "ab") as file:
        file.truncate(1 << 40)  # a terabyte, of holes
    with pytest.raises(CheckpointError, match="it has 1,099,511,627,776 bytes"):
        found.read_part(found.load("step-1"), "joint")


def test_an_archive_that_unpacks_without_end_is_read_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "MOST_BYTES", 1 << 20)
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", compresslevel=9) as file:
        file.write(struct.pack(">4I", 0x803, 3, 1024, 1024))
        for _ in range(3):
            file.write(bytes(1 << 20))
    with pytest.raises(DataError, match="is damaged"):
        open_source(f"mnist:{tmp_path}")


def test_links_count_what_they_refuse() -> None:
    keys = Keys.make()
    hub = ZmqHub(keys=keys, host="127.0.0.1")
    link = ZmqLink(me=0, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    other = ZmqLink(me=1, attempt=0, keys=keys, coordinator=hub.address, host="127.0.0.1")
    try:
        other.connect({0: link.address})
        other.send(0, {"t": "part", "a": "first"})
        poll(lambda: bool(link.receive(0.05)) or link.refused == 1)
        assert link.refused == 1
    finally:
        for end in (link, other, hub):
            end.close()


LONG_RECIPES = {
    "an integer of 5,000 hexadecimal digits": (
        "[train]\nepochs = 0x" + "f" * 5000,
        "train.epochs is an integer of 20000",
    ),
    "one in a strategy": ("[strategy]\nname = ['x', {a = 0x" + "f" * 5000 + "}]", "strategy.name.1..a is an integer"),
    "a key of 100,000 parts": ("a" + ".a" * 100_000 + " = 1", "line 1 has a key of more than 32 parts"),
    "of quoted parts": ("\n" + "'='" + ".'='" * 100_000 + " = 1", "line 2 has a key of more than 32 parts"),
    "of long quoted parts": (".".join(['"' + "b" * 120 + '"'] * 7000) + " = 1", "line 1 has a key of more than 32"),
    "of a table": ("[ a" + " . a" * 100_000 + "]\nx = 1", "line 1 has a key of more than 32 parts"),
    "in an inline table": ("x = {y = 1, a" + ".a" * 400_000 + " = 1}", "line 1 has a key of more than 32 parts"),
    "with long parts there": ("x = {" + ".".join(['"' + "b" * 120 + '"'] * 7000) + " = 1}", "more than 32 levels deep"),
    "nested arrays": ("x = " + "[" * 100_000, "not valid TOML"),
    "nested tables": ("[train]\nstop = " + "{a = " * 40 + "1" + "}" * 40, "more than 32 levels deep"),
    "a long text": ("[train]\nloss = '" + "x" * 900_000 + "'", "train.loss is a text of 900000 characters"),
    "a long key": ("[train]\n" + "x" * 900_000 + " = 1", "a key of 900000 characters"),
    "quotes": ("x = " + '"' * 900_000, "not valid TOML"),
    "a word": ("a" * 1_000_000, "not valid TOML"),
    "keys that are nearly too long": (("a." * 31 + "=") * 15_000, "not valid TOML"),
}


@pytest.mark.parametrize(("text", "said"), LONG_RECIPES.values(), ids=LONG_RECIPES)
def test_a_recipe_that_would_take_long_is_refused_in_a_few_words(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        recipe.load(str(tmp_path / "recipe.toml"))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a" + ".a" * 100_000 + "=1", "has 200003 characters"),
        ("train" + ".a" * 100 + "=1", "a key of 101 parts"),
        ("train.epochs=0x" + "f" * 5000, "train.epochs is an integer of 20000 bits"),
        ("train.epochs=" + "[" * 4000, "train.epochs = '.*it must be int"),
        ("train.epochs=1\na" + ".a" * 4000 + "=1", "train.epochs = '1.*it must be int"),
    ],
    ids=["a long key", "a deep key", "an integer", "arrays", "a second line"],
)
def test_a_change_to_a_recipe_has_limits_too(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "recipe.toml").write_text("[train]\nepochs = 1\n")
    with pytest.raises(ConfigError, match=said) as error:
        recipe.load(str(tmp_path / "recipe.toml"), [change])
    assert len(str(error.value)) < 1000


def test_long_lines_of_an_ordinary_recipe_are_read(tmp_path: Path) -> None:
    words, files = "a " * 2000, ", ".join(f"'rows.{i}.a.b.c.parquet'" for i in range(5000))
    text = f"[data]\nsource = [{files}]\nlabel = '''\n{words}\n'''\n[strategy]\nrates = [{'0.1, ' * 5000}]\n"
    (tmp_path / "recipe.toml").write_text(text)
    found = recipe.load(str(tmp_path / "recipe.toml"))
    assert found.data.source is not None
    assert len(found.data.source) == len(found.strategy["rates"]) == 5000
