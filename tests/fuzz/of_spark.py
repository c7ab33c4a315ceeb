"""What travels with Spark's own jobs: visits to boxes, letters, contributions, and what an estimator was stored as."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.fuzz.draw import Draw, as_sent
from tests.fuzz.target import Target
from thinwire.cluster.frames import decode_images
from thinwire.errors import CheckpointError, ConfigError, DataError, ProtocolError
from thinwire.exchange.spark import box, link, post, tasks
from thinwire.exchange.spark.link import SparkLink, SparkWire

AT_ONCE = 4 << 20
"""Memory that may be taken before the bytes for it have come."""


class _Door:
    """A socket whose other end sent some bytes, and went."""

    def __init__(self, data: bytes, sheet: int) -> None:
        self._data, self._at, self._sheet = data, 0, sheet

    def recv_into(self, view: memoryview, size: int) -> int:
        assert size <= AT_ONCE, "memory for what has not come"
        found = self._data[self._at : self._at + min(size, len(view))]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def recvmsg(self, size: int, ancillary: int = 0, flags: int = 0) -> Any:
        if self._sheet == 0:
            return b"", [], 0, None
        made = os.memfd_create("fuzz")
        os.truncate(made, self._sheet)
        return b"s", [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made]).tobytes())], 0, None


VISIT = {
    "t": "post",
    "letters": [[1, -1, {"t": "pong"}, None], [2, -2, {"t": "sum"}, 0]],
    "ack": 0,
    "wait": 0.0,
    "token": "t",
}
VISIT |= {"sizes": [[4, 0], [100, 1]]}


def _box(data: bytes) -> None:
    draw = Draw(data)
    sheet = draw.pick((0, 100, 5, 1))
    if draw.byte() % 2:
        text = json.dumps(draw.changed(VISIT)).encode()
        raw = struct.pack("<Q", len(text)) + text + b"some"
    else:
        raw = draw.rest()
    try:
        header, frames = box.receive(_Door(raw, sheet))  # type: ignore[arg-type]
        assert isinstance(header, dict)
        assert all(isinstance(frame, memoryview) for frame in frames)
    except ProtocolError:
        pass


def _box_seeds() -> list[bytes]:
    text = json.dumps(VISIT | {"sizes": [[4, 0]]}).encode()
    return [b"\x01\x01\x00", b"\x00\x00" + struct.pack("<Q", len(text)) + text + b"some", b"\x02\x01\x01\x00\x00\x05"]


READ = {"t": "read", "r": "train:0", "g": 1, "job": "x"}
HAND = {
    "t": "hand",
    "header": {"t": "sum", "g": 1, "r": "train:0", "s": [0, 4], "k": "float32", "m": "float32", "n": {}},
}


def _visit(data: bytes) -> None:
    draw = Draw(data)
    with patch.object(link, "Box", lambda *given: None):
        agent = SparkLink(SparkWire("run", "token"), 0, 0)
    agent.send(-1, {"t": "join"}, memoryview(b"some"))
    agent.offer("train:0", link.Offer(1, 1.0, None))
    for _ in range(3):
        if not draw.more:
            break
        header = as_sent(draw.changed(draw.pick((VISIT, READ, HAND)))) | {"wait": 0.0}
        frames = [memoryview(b"some")] * (draw.byte() % 3)
        try:
            for told, _ in agent._serve(header, frames):
                json.dumps(told)
        except ProtocolError:
            pass
        for message in agent.receive(0.0):
            assert isinstance(message.header, dict)
            assert isinstance(message.header.get("t"), str)
            assert type(message.sender) is int
        assert agent._lock.acquire(blocking=False), "left locked"
        agent._lock.release()


def _visit_seeds() -> list[bytes]:
    return [b"\x00\x00\x01", b"\x01\x00\x00", b"\x02\x00\x01", b"\x00\x00\x01\x00\x00\x02\x01\x00\x00"]


class _Context:
    """As much of a SparkContext as is asked for when nothing is sent to it."""

    def setJobGroup(self, *given: Any, **more: Any) -> None: ...

    def addJobTag(self, *given: Any) -> None: ...

    def broadcast(self, value: Any) -> Any:
        return self

    def destroy(self) -> None: ...


class _Session:
    sparkContext = _Context()  # noqa: N815


class _Now:
    def submit(self, act: Any, *given: Any) -> None:
        act(*given)


class _Post(post.Post):
    def _look_around(self) -> None:
        """Nobody to look for."""


def _post() -> post.Post:
    with (
        patch.object(post.threading, "Thread", lambda **given: _Context()),
        patch.object(_Context, "start", lambda s: None, create=True),
    ):
        made = _Post(_Session(), SparkWire("run", "token"), 2)
    made._pool = _Now()  # type: ignore[assignment]
    made.begin(1, {0: 0, 1: 0})
    return made


LAUNCHED = {
    "t": "launched",
    "g": 1,
    "a": 0,
    "r": "train:0",
    "s": [0, 4],
    "k": "float32",
    "c": 0,
    "w": 1.0,
    "n": {"rows": 1},
}
LETTERS: tuple[Any, ...] = (
    [1, -1, LAUNCHED, 0],
    [1, -1, {**LAUNCHED, "k": "int8"}, 1],
    [1, -1, {"t": "beat", "a": 0}, None],
    [1, 1, {"t": "want", "g": 1, "a": 0}, None],
    [1, -1, {"t": "settled", "r": "train:0"}, None],
)


def _letters(data: bytes) -> None:
    draw, made = Draw(data), _post()
    for turn in range(3):
        if not draw.more:
            break
        told: dict[str, Any] = {}
        fetched: dict[str, list[memoryview]] = {}
        for name in ("0.0", "1.0"):
            letters = [draw.pick(LETTERS) for _ in range(1 + draw.byte() % 2)]
            letters = [[turn * 4 + i + 1, *letter[1:]] for i, letter in enumerate(letters)]
            frames = [memoryview(np.ones(4, np.float32)).cast("B"), memoryview(bytes([0, 0, 128, 63, 1, 2, 3, 4]))]
            answer = as_sent(draw.changed({"seen": 0, "letters": letters}))
            if tasks.understood(answer, frames):
                told[name], fetched[name] = {"seen": 0, "letters": []} | answer, frames
        _sizes, parts = tasks._packed(told, fetched)
        made._came("machine", as_sent(told), [memoryview(bytearray(part)) for part in parts])
        assert made.error is None, made.error
        while not made.inbox.empty():
            message = made.inbox.get()
            assert isinstance(message.header.get("t"), str)


def _letters_seeds() -> list[bytes]:
    return [bytes([0, a, 0, b, 0]) for a in range(5) for b in range(5)] + [bytes([1, 0, 2, 0, 1, 3, 4, 0])]


CODES: tuple[Any, ...] = (
    {"kind": "value", "value": {"a": [1, 2]}},
    {"kind": "zoo", "name": "mlp"},
    {"kind": "strategy", "name": "mpca", "knobs": {"fragments": 2}},
    {"kind": "name", "module": "math", "name": "sqrt"},
    {"kind": "partial", "of": "decode_images", "args": [{"kind": "value", "value": ["x"]}]},
    {"kind": "pickle", "data": "gAU="},
)
METADATA = {
    "uid": "TorchModel_1",
    "thinwire": {"more": {"features": ["x"]}, "code": {"model": CODES[0]}, "size_bytes": 0},
}


def _storage(data: bytes) -> None:
    from thinwire.spark.storage import held_in, made_of

    draw = Draw(data)
    try:
        if draw.byte() % 2:
            held_in(as_sent(draw.changed(METADATA)), "path")
        else:
            code = as_sent(draw.changed(draw.pick(CODES)))
            made_of(code, path="path", allow_pickle=False)
    except (CheckpointError, ConfigError):
        pass


IMAGE = {"origin": "x", "height": 2, "width": 2, "nChannels": 3, "mode": 16}


def _images(data: bytes) -> None:
    draw = Draw(data)
    image = as_sent(draw.changed(IMAGE)) | {"data": bytearray(draw.bytes(draw.byte() % 25))}
    try:
        found = decode_images(("x",), {"x": [image]})
        assert found["x"].ndim == 4
    except DataError:
        pass


TARGETS = (
    Target("box", _box, _box_seeds, "visits to an agent's box, as they come through its socket"),
    Target("visit", _visit, _visit_seeds, "what a visitor brings to an agent", 128),
    Target("letters", _letters, _letters_seeds, "letters that a job brings to the driver", 128),
    Target(
        "storage",
        _storage,
        lambda: [bytes([0, k, 0]) for k in range(6)] + [b"\x01\x00"],
        "stored estimators and models: metadata and code by name",
        64,
    ),
    Target("images", _images, lambda: [b"\x00\x0c" + bytes(range(12))], "rows of Spark's image schema", 64),
)
