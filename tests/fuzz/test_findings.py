"""What fuzzing found, once each, and as small as it can be said."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import zmq

from tests.forms import has_form
from tests.fuzz.of_exchange import BEAT, NOTE, PART, SIZE, _begun, _Link, _tree
from tests.fuzz.of_protocol import PROGRESS, SAID
from tests.fuzz.of_spark import HAND, LAUNCHED, METADATA, VISIT, _post
from thinwire import events, recipe, units
from thinwire.checkpoint import decode, encode
from thinwire.cluster.frames import decode_images
from thinwire.coordinator.records import Records
from thinwire.dashboard.event_reducer import EventReducer, Reader
from thinwire.dashboard.follow import Follower
from thinwire.dashboard.prometheus import exposition
from thinwire.dashboard.server import PageServer, Source, _json
from thinwire.data import open_source
from thinwire.data.shards import Shard, write_shard
from thinwire.errors import CheckpointError, ConfigError, DataError, ProtocolError
from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.spark import box
from thinwire.exchange.spark.link import SparkLink, SparkWire
from thinwire.exchange.spark.tasks import understood
from thinwire.protocol.chunks import Reassembly
from thinwire.protocol.messages import TO_COORDINATOR, Message
from thinwire.strategies import MPCA
from thinwire.strategies.registry import strategy
from thinwire.transport import zmq as wire

# -- the wire ---------------------------------------------------------------------------------------------------------


def frames(identity: bytes, header: Any) -> list[zmq.Frame]:
    return [zmq.Frame(identity), zmq.Frame(json.dumps(header).encode())]


@pytest.mark.parametrize("attempt", ["0", None, [0], 0.5, True])
def test_a_header_whose_attempt_is_no_whole_number_is_refused(attempt: Any) -> None:
    assert wire._parse(frames(b"1.0", BEAT), 1) is not None
    assert wire._parse(frames(b"1.0", BEAT | {"a": attempt}), 1) is None


@pytest.mark.parametrize("identity", [b"-1.0", b"", b" 1.0", b"1_0.0", b"x", b"9" * 5000])
def test_a_worker_cannot_pass_for_the_coordinator_or_for_no_worker_at_all(identity: bytes) -> None:
    assert wire._parse(frames(identity, BEAT), 1) is None


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (0, 10**9)])
def test_a_piece_that_is_of_no_parcel_is_refused(index: int, count: int) -> None:
    with pytest.raises(ProtocolError, match="piece"):
        Reassembly().add(index, count, memoryview(b"x"))


# -- members ----------------------------------------------------------------------------------------------------------


def member(digest: str) -> tuple[Member, _Link, JointState]:
    link, joint = _Link(), JointState(MPCA(), torch.zeros(SIZE), 3)
    found = Member(link, Identity(0, 0, {}), joint, codec_name="float32", trees=TreeCodec(encode, decode))
    _begun(found, link, digest, {})
    return found, link, joint


@pytest.mark.parametrize(
    "change",
    [
        {"state": [torch.ones(SIZE)]},
        {"state": [torch.ones(SIZE), torch.ones(SIZE + 1)]},
        {"state": [torch.ones(SIZE), "text"]},
        {"cuts": []},
        {"cuts": [{"size": SIZE + 1, "setting": {}, "since": 0, "cycles": 0}]},
        {"cuts": [{"size": SIZE, "setting": {"fragments": "many"}, "since": 0, "cycles": 0}]},
    ],
    ids=["short", "of another length", "of text", "without cuts", "of another model", "cut by text"],
)
def test_a_joint_state_that_does_not_fit_is_refused_and_nothing_of_it_is_kept(change: dict[str, Any]) -> None:
    found, link, joint = member("other")
    tree = _tree({})
    tree["joint"] |= change
    link.ready = [Message(1, {"t": "state", "g": 1, "a": 0, "i": 0, "n": 1}, memoryview(encode(tree)))]
    found.turn()
    assert found.rounds.refused == 1
    assert torch.equal(joint.model, torch.zeros(SIZE))
    assert joint.cuts.newest.size == SIZE


@pytest.mark.parametrize(
    "note",
    [NOTE | {"setting": {"strange": 1}}, NOTE | {"setting": {"fragments": 0}}, {"setting": {}}, {"rows": "many"}],
    ids=["a strange setting", "no fragments", "a setting since no round", "rows in words"],
)
def test_a_note_that_would_end_every_worker_is_refused_when_it_comes(note: dict[str, Any]) -> None:
    found, link, joint = member("same")
    whole = {"s": list(joint.fragment(0)), "n": note}
    link.ready = [Message(1, json.loads(json.dumps(PART | whole)), memoryview(bytearray(4 * 256)))]
    found.turn()
    assert found.rounds.refused == 1


# -- the driver -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", SAID, ids=lambda said: str(said["t"]))
def test_each_header_that_workers_send_is_understood_and_with_a_strange_field_is_not(said: dict[str, Any]) -> None:
    assert has_form(TO_COORDINATOR, said)
    free = {"why", "fields", "protocol"}  # of a protocol that is not known the driver says so by name
    for name in said.keys() - free:
        assert not has_form(TO_COORDINATOR, said | {name: {"strange": [[]]}}), name
    assert not has_form(TO_COORDINATOR, {k: v for k, v in said.items() if k != "a"})


@pytest.mark.parametrize(
    "change",
    [
        {"progress": PROGRESS | {"steps": "1"}},
        {"progress": {"steps": 1}},
        {"progress": PROGRESS | {"position": [1]}},
        {"waiting": {"train:1": 3}},
        {"landed": -1},
        {"landed": 2**70},
    ],
)
def test_a_heartbeat_that_does_not_add_up_is_not_understood(change: dict[str, Any]) -> None:
    assert not has_form(TO_COORDINATOR, SAID[0] | change)


@pytest.mark.parametrize(
    ("name", "known"), [("000001-step-96", True), ("000002-final", True), ("../x", False), ("1" * 5000, False)]
)
def test_only_checkpoints_that_are_named_as_workers_name_them_are_understood(name: str, known: bool) -> None:
    assert has_form(TO_COORDINATOR, SAID[3] | {"name": name}) is known


@pytest.mark.parametrize("fields", [{}, {"round": "one"}, {"unknown": 1}])
def test_an_event_with_other_fields_than_it_has_is_not_understood(fields: dict[str, Any]) -> None:
    assert not has_form(TO_COORDINATOR, SAID[5] | {"fields": SAID[5]["fields"] | fields if fields else {}})


def test_what_a_lost_worker_left_unsaid_is_told_though_its_successor_has_yet_to_step() -> None:
    log: list[events.Event] = []
    records = Records(log.append)
    first = TO_COORDINATOR.decode(SAID[0])
    records.beat(0, 0, first, 10.0)
    records.beat(0, 0, replace(first, progress=PROGRESS | {"steps": 2}), 10.1)
    records.lose(0)
    records.beat(0, 1, replace(first, attempt=1, sent_bytes=0, progress={}), 10.2)
    assert [(event.steps, event.attempt) for event in log if isinstance(event, events.Progressed)] == [(1, 0), (2, 0)]


# -- Spark ------------------------------------------------------------------------------------------------------------


def visited(raw: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=lambda: (theirs.sendall(raw), theirs.close()), daemon=True).start()
        ours.settimeout(600.0)
        return box.receive(ours)


def said(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "raw",
    [
        said([]),
        said({}),
        said({"sizes": 3}),
        said({"sizes": [[1]]}),
        said({"sizes": [[float("inf"), 0]]}),
        struct.pack("<Q", 6) + b"[" * 6,
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["a list", "no sizes", "a number", "half a size", "no end", "cut off", "nested"],
)
def test_a_visit_that_nobody_understands_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        visited(raw)


def test_memory_for_a_frame_is_taken_as_it_comes_and_not_as_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Door:
        left = said({"sizes": [[6 << 30, 0]]})

        def recv_into(self, view: memoryview, size: int) -> int:
            asked.append(len(view))
            found, self.left = self.left[:size], self.left[size:]
            view[: len(found)] = found
            return len(found)

    with pytest.raises(ProtocolError, match="gone"):
        box.receive(Door())  # type: ignore[arg-type]
    assert max(asked) <= 1 << 20


def test_long_frames_still_come_whole() -> None:
    data = os.urandom(3 << 20)
    header, found = visited(said({"t": "x", "sizes": [[len(data), 0]]}) + data)
    assert header == {"t": "x"}
    assert bytes(found[0]) == data


@pytest.fixture
def agent() -> Any:
    link = SparkLink(SparkWire(os.urandom(4).hex(), "token"), 0, 0)
    yield link
    link.close()


@pytest.mark.parametrize(
    "letters",
    [[[1, -1, {"t": "pong"}, None], [2, -1, [], None]], [[1, -1, {"t": 3}, None]], [[1, -1, {"t": "sum"}, 7]], [[1]]],
    ids=["no table", "no kind", "a frame that did not come", "half a letter"],
)
def test_of_a_visit_with_a_letter_that_is_none_nothing_is_taken(agent: Any, letters: Any) -> None:
    with pytest.raises(ProtocolError):
        list(agent._serve(VISIT | {"letters": letters}, []))
    assert agent.receive(0.0) == []
    assert agent._seen == 0


def test_a_mean_that_is_handed_over_without_a_header_is_refused(agent: Any) -> None:
    with pytest.raises(ProtocolError):
        list(agent._serve(HAND | {"header": 3}, []))


@pytest.mark.parametrize(
    "change", [{"s": [0]}, {"k": "int3"}, {"w": -1.0}, {"w": "x"}, {"n": 3}, {"s": [0, 5]}, {"r": None}]
)
def test_a_contribution_that_does_not_fit_stays_on_its_machine(change: dict[str, Any]) -> None:
    frame = memoryview(bytes(16))
    assert understood({"seen": 1, "letters": [[1, -1, LAUNCHED, 0]]}, [frame])
    header = {k: v for k, v in (LAUNCHED | change).items() if v is not None}
    assert not understood({"seen": 1, "letters": [[1, -1, header, 0]]}, [frame])


def test_a_contribution_of_another_length_than_the_first_is_refused_and_counted() -> None:
    post = _post()
    for worker, length in ((0, 4), (1, 8)):
        letter = [1, -1, LAUNCHED | {"s": [0, length]}, 0]
        boxes = {f"{worker}.0": {"seen": 0, "letters": [letter]}}
        post._came("machine", boxes, [memoryview(bytearray(4 * length))])
    assert post.refused == 1
    assert post.error is None


@pytest.mark.parametrize(
    "held",
    [
        None,
        [],
        {},
        {"more": {}, "code": {}},
        {"more": [], "code": {}, "size_bytes": 0},
        {"more": {}, "code": {"m": 1}, "size_bytes": 0},
    ],
)
def test_a_stored_model_whose_metadata_are_damaged_is_a_checkpoint_error(held: Any) -> None:
    storage = pytest.importorskip("thinwire.spark.storage", reason="PySpark is not installed")
    with pytest.raises(CheckpointError):
        storage.held_in(METADATA | {"thinwire": held}, "folder")


@pytest.mark.parametrize(
    "code", [{}, {"kind": "zoo", "name": "x"}, {"kind": "name", "module": "", "name": "x"}, {"kind": "strategy"}]
)
def test_stored_code_that_is_damaged_is_a_checkpoint_error(code: dict[str, Any]) -> None:
    objects = pytest.importorskip("thinwire.spark.objects", reason="PySpark is not installed")
    with pytest.raises(CheckpointError):
        objects.made_of(code, "model", objects.Source("folder"))


@pytest.mark.parametrize(
    "change", [{"height": 3}, {"height": None}, {"width": -2}, {"nChannels": 0, "data": b""}, {"height": 1e400}]
)
def test_an_image_whose_size_and_bytes_do_not_agree_is_a_data_error(change: dict[str, Any]) -> None:
    image = {"height": 2, "width": 2, "nChannels": 1, "data": bytes(4)} | change
    with pytest.raises(DataError, match="image"):
        decode_images(("x",), {"x": [image]})


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"\xff\xfe", b"x = " + b"[" * 5000], ids=["no text", "nested"])
def test_a_recipe_that_no_parser_takes_is_a_config_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.toml").write_bytes(text)
    with pytest.raises(ConfigError, match="not valid TOML"):
        recipe.load(str(tmp_path / "r.toml"))


def test_a_change_to_a_recipe_that_is_nested_too_deep_is_text() -> None:
    values: dict[str, Any] = {}
    recipe.apply(values, "model.zoo=" + "[" * 5000)
    assert values["model"]["zoo"] == "[" * 5000


@pytest.mark.parametrize("name", [5, {"pull": 0.5}, ["mpca"], None])
def test_a_strategy_whose_name_is_no_text_is_a_config_error(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"strategy.name = .* is not known"):
        strategy(name)


def test_a_rate_past_every_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="not understood"):
        units.rate_bits("9" * 400 + "mbit")


def arrow_file(path: Path, old: bytes, new: bytes, values: Any = None) -> str:
    """A whole Arrow file, of text where no values are given, in which some bytes are others."""
    sink = io.BytesIO()
    batch = pa.RecordBatch.from_pydict({"label": pa.array(["a" * 77, "b" * 77]) if values is None else values})
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return str(path)


OFFSETS, ELSEWHERE = struct.pack("<3i", 0, 77, 154), struct.pack("<3i", 0, 1 << 30, 154)


def test_an_arrow_file_whose_offsets_point_elsewhere_is_a_data_error_and_no_crash(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "rows.arrow", OFFSETS, ELSEWHERE)
    source = open_source(path)
    with pytest.raises(DataError, match="cannot be read"):
        write_shard(str(tmp_path / "shard"), source.batches(), source.schema)


def test_a_shard_whose_offsets_point_elsewhere_is_a_data_error_and_no_crash(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as a shard"):
        Shard.open(arrow_file(tmp_path / "shard", OFFSETS, ELSEWHERE))


def test_a_file_of_lists_with_fewer_than_no_values_is_a_data_error(tmp_path: Path) -> None:
    lists = pa.array([], pa.list_(pa.bool_(), 77))
    path = arrow_file(tmp_path / "rows.arrow", struct.pack("<i", 77), struct.pack("<i", -7), lists)

    def ingest() -> None:
        source = open_source(path)
        write_shard(str(tmp_path / "shard"), source.batches(), source.schema)

    with pytest.raises(DataError):
        ingest()


def test_files_whose_columns_have_names_that_are_no_text_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        open_source(arrow_file(tmp_path / "rows.arrow", b"label", b"\xff\xfe\xff\xfe\xff"))
    with pytest.raises(DataError):
        Shard.open(arrow_file(tmp_path / "shard", b"label", b"\xff\xfe\xff\xfe\xff"))


def idx_folder(folder: Path, images: bytes) -> str:
    (folder / "train-images-idx3-ubyte.gz").write_bytes(images)
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 1) + b"\1")
    return f"mnist:{folder}"


def test_a_packed_set_that_is_damaged_is_a_data_error(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(struct.pack(">4I", 0x803, 1, 28, 28) + bytes(784), mtime=0))
    packed[10:14] = b"\xff\xff\xff\xff"
    with pytest.raises(DataError, match="cannot be read"):
        open_source(idx_folder(tmp_path, bytes(packed)))


def test_of_a_packed_set_no_more_is_unpacked_than_its_head_says(tmp_path: Path) -> None:
    packed = gzip.compress(struct.pack(">4I", 0x803, 1, 2, 2) + bytes(64 << 20), 1)
    with pytest.raises(DataError, match=r"damaged.* 21 bytes"):
        open_source(idx_folder(tmp_path, packed))


@pytest.mark.parametrize("pages", [1, 2])
def test_a_folder_of_images_that_is_cut_short_is_a_data_error_and_no_crash(tmp_path: Path, pages: int) -> None:
    sources = pytest.importorskip("thinwire.caffe.sources", reason="protobuf is not installed")
    folder = tmp_path / "images"
    sources.write_lmdb(folder, [(np.ones((1, 2, 2), np.uint8), 3)])
    with open(folder / "data.mdb", "r+b") as file:
        file.truncate(pages * os.sysconf("SC_PAGE_SIZE"))
    with pytest.raises(DataError):
        sources.DatumSource(folder)


def test_a_layer_without_name_and_type_is_a_config_error() -> None:
    caffe = pytest.importorskip("thinwire.caffe", reason="protobuf is not installed")
    with pytest.raises(ConfigError, match="layer ''"):
        caffe.loads("layer { }")


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "status"), [("http://[", {}, 400), ("/", {"Host": "["}, 403), ("/?" + "a&" * 99, {}, 400)]
)
def test_an_address_that_is_none_gets_an_answer(path: str, headers: dict[str, str], status: int) -> None:
    server = PageServer([Source("run")], "127.0.0.1", 0, "").start()
    try:
        with socket.create_connection(server.server_address[:2], timeout=600.0) as asking:
            host = headers.get("Host", "localhost")
            asking.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            assert asking.recv(64).split()[1] == str(status).encode()
    finally:
        server.close()


def test_a_line_of_events_that_is_nested_too_deep_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("[" * 100_000 + '\n{"kind": "x", "time": 1}\n')
    assert [event["kind"] for event in Follower(str(tmp_path)).new()] == ["x"]


def test_an_event_with_a_value_that_is_nested_deep_does_not_end_the_stream_of_news() -> None:
    story, deep = EventReducer(), {}
    for _ in range(900):
        deep = {"a": deep}
    story.feed({"kind": "run_started", "time": 1.0, "knobs": deep})
    assert json.loads(_json({"run": Reader().news(story)}))["run"]["head"]["state"] == "running"


def test_a_host_whose_name_is_no_text_and_a_count_past_all_numbers_do_not_end_the_counters() -> None:
    story = EventReducer()
    story.feed({"kind": "worker_joined", "time": 1.0, "worker": 0, "host": "\ud800"})
    story.feed({"kind": "progressed", "time": 2.0, "worker": 0, "rows": 10**400, "steps": 1})
    text = exposition([("run", story, threading.Lock(), 0.0)])
    assert b'host="?"' in text.encode()
    assert story.head["unread"] == 1


def test_a_metric_that_is_a_huge_integer_does_not_end_what_prometheus_reads() -> None:
    story = EventReducer()
    for number, value in enumerate((2**63, 10**300, "0.5", True)):
        story.feed({"kind": "evaluated", "time": 1.0, "number": number, "steps": 1, "metrics": {"loss": value}})
        assert 'name="loss"' in exposition([("run", story, threading.Lock(), 0.0)])
