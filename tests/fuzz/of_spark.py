"""What travels with Spark's own jobs: visits to boxes, letters, contributions, and what an estimator was stored as."""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import socket
import struct
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from tests.fuzz.draw import WORDS, Draw, as_sent
from tests.fuzz.target import Target
from thinwire.cluster.frames import decode_images
from thinwire.data.tables import TableEncoder
from thinwire.errors import CheckpointError, ConfigError, DataError, ProtocolError
from thinwire.exchange.spark import box, link, post, tasks
from thinwire.exchange.spark.link import SparkLink, SparkWire
from thinwire.models import ZOO, ZooModel
from thinwire.run.definition import composed

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


F = {"kind": "name", "module": "torch.utils.collect_env", "name": "run"}
DECODER = {"kind": "partial", "of": "decode_images", "args": [{"kind": "value", "value": ["x"]}]}
CODES: tuple[Any, ...] = (
    {"kind": "value", "value": {"a": [1, 2]}},
    {"kind": "zoo", "name": "mlp"},
    {"kind": "strategy", "name": "mpca", "knobs": {"fragments": 2}},
    {"kind": "name", "module": "math", "name": "sqrt"},
    DECODER,
    {"kind": "pickle", "data": "gAU="},
    {"kind": "partial", "of": "in_turn", "args": [F, F, {"kind": "value", "value": "exit 1"}]},
    {"kind": "partial", "of": "in_turn", "args": [DECODER, F]},
    {"kind": "name", "module": "torch.nn.modules.linear", "name": "Linear"},
)
METADATA = {
    "uid": "TorchModel_1",
    "thinwire": {"more": {"features": ["x"]}, "code": {"model": CODES[0]}, "size_bytes": 0},
}


def _storage(data: bytes) -> None:
    from thinwire.spark.storage import held_in, refuse_objects

    draw = Draw(data)
    try:
        if draw.byte() % 2:
            held_in(as_sent(draw.changed(METADATA)), "path")
        else:
            _ = _made(as_sent(draw.changed(draw.pick(CODES))), draw)
        refuse_objects({"paramMap": {}, "defaultParamMap": {"loss": draw.pick(WORDS)}}, "path", ["loss"])
    except (CheckpointError, ConfigError, ValueError):
        pass


PARTS = ("torch", "utils", "collect_env", "run", "os", "system", "nn", "Linear", "posix", "abort", "builtins", "exec")
PARTS += ("hub", "load", "sys", "exit", "__main__", "__init__", "__class__", "thinwire", "session", "composed", "mlp")
OFS = ("in_turn", "decode_images", "torch.utils.collect_env.run", "exec")


def skeleton(draw: Draw, depth: int = 3) -> Any:
    """Code of any kind, with names that there are and names that there are not, at every depth."""
    kind = draw.byte() % 8
    if kind < 2 and depth:
        parts = [skeleton(draw, depth - 1) for _ in range(draw.byte() % 4)]
        found: Any = {"kind": "partial", "of": draw.pick(OFS), "args": parts}
    elif kind < 5:
        names = [".".join(draw.pick(PARTS) for _ in range(1 + draw.byte() % 3)) for _ in range(2)]
        found = {"kind": "name", "module": names[0], "name": names[1]}
    else:
        found = draw.pick(CODES)
    return draw.changed(found) if not draw.byte() % 4 else found


def _skeleton(data: bytes) -> None:
    draw = Draw(data)
    with contextlib.suppress(CheckpointError, ConfigError):
        _made(as_sent(skeleton(draw)), draw)


FORBIDDEN = ("compile", "exec", "import", "os.exec", "os.fork", "os.posix_spawn", "os.system", "pickle.find_class")
_done: list[str] | None = None
"""Forbidden acts while a loader is watched; None at other times."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _done is not None and (event in FORBIDDEN or event.startswith(("subprocess.", "ctypes."))):
        _done.append(f"{event} {args}")


@functools.cache
def _audited() -> None:
    """Has Python itself tell of imports, processes and code, whoever begins them; there is no way back from it."""
    sys.addaudithook(_audit)


def _made(code: Any, draw: Draw) -> Any:
    """What a slot makes of code, which must be of the slot's kind, and without a forbidden act."""
    from thinwire.spark.objects import SLOTS, Source, made_of

    global _done
    _audited()
    slot, acts = draw.pick((*SLOTS, "transform", "transform", "model")), []
    _done = acts
    try:
        found = made_of(code, slot, Source("path"))
    finally:
        _done = None
        assert not acts, acts
    _is_of(found, slot)
    return found


def _is_of(found: Any, slot: str) -> None:
    if isinstance(found, functools.partial):
        assert slot == "transform"
        if found.func is decode_images:
            assert len(found.args) == 1
            assert all(type(name) is str for name in found.args[0])
        else:
            assert found.func is composed
            assert len(found.args) == 2
            for part in found.args:
                _is_of(part, "transform")
    elif isinstance(found, TableEncoder):
        assert slot == "transform"
    elif isinstance(found, ZooModel):
        assert slot == "model"
        assert found.name in ZOO
    elif callable(found):
        bases: dict[str, Any] = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
        known = slot == "model" and found in ZOO.values()
        assert known or (isinstance(found, type) and issubclass(found, bases[slot]))


PARAMETERS = {"weight": [3, 4], "bias": [3]}
PLAIN = {
    "format": 1,
    "transform": False,
    "inputs": [{"dtype": "float32", "shape": [4]}],
    "state": [{"name": f"0.{n}", "dtype": "float32", "shape": s, "trained": True} for n, s in PARAMETERS.items()],
    "constants": [],
    "nodes": [
        {"op": "permute.default", "args": [{"state": "0.weight"}, [1, 0]], "kwargs": {}},
        {"op": "addmm.default", "args": [{"state": "0.bias"}, {"value": 0}, {"value": 1}], "kwargs": {}},
        {"op": "sym_size.int", "args": [{"value": 0}, 0], "kwargs": {}},
        {"op": "view.default", "args": [{"value": 2}, [{"value": 3}, 1, 3]], "kwargs": {}},
        {"op": "max.dim", "args": [{"value": 4}, 1], "kwargs": {"keepdim": True}},
        {"op": "item", "args": [{"value": 5}, 0], "kwargs": {}},
    ],
    "output": 6,
}
"""Of a small network, as `exported` writes it, with a few operations more."""


def _operations(draw: Draw) -> Any:
    """Nodes with operations, arguments and references that there are and that there are not."""
    from thinwire.models.program import OPERATIONS, WHOLE

    names, nodes = sorted(OPERATIONS | set(WHOLE)), []
    while draw.more and len(nodes) < 6:
        args: list[Any] = []
        for _ in range(draw.byte() % 5):
            of = (
                {"value": draw.byte() % 8},
                {"state": "0.weight"},
                draw.byte() - 128,
                [draw.byte(), -1],
                {"float": "nan"},
            )
            args.append(draw.pick((*of, [{"value": 0}], {"dtype": "int64"}, None, True, 0.5, draw.value(1))))
        op = names[(draw.byte() * 256 + draw.byte()) % len(names)] if draw.byte() % 8 else draw.value(0)
        nodes.append({"op": op, "args": args, "kwargs": {}})
    return nodes


def _program(data: bytes) -> None:
    """Reads a document; what is read is carried out, and gives rows or says why not."""
    from thinwire.models.program import Program

    draw = Draw(data)
    made: Any = dict(PLAIN)
    if draw.byte() % 2:
        made["nodes"] = _operations(draw)
        made["output"] = len(made["nodes"])
    else:
        made = as_sent(draw.changed(PLAIN))
    text = json.dumps(made).encode() if draw.byte() % 16 else draw.rest()
    with contextlib.suppress(CheckpointError):
        program = Program.read(struct.pack("<Q", len(text)) + text)
        forms = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in program.state_dict().items()}
        program.load_state_dict(forms, assign=True)
        with contextlib.suppress(RuntimeError, IndexError, DataError), torch.no_grad():
            assert isinstance(program(*[torch.zeros(3, 4) for _ in program._plan.inputs]), torch.Tensor)


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
        lambda: [bytes([0, k, 0]) for k in range(9)] + [b"\x01\x00"],
        "stored estimators and models: metadata and code by name",
        64,
    ),
    Target(
        "skeleton",
        _skeleton,
        lambda: [bytes([0, 3, k, 0, a, b, 1, 0]) for k in range(4) for a in (2, 5) for b in range(3)],
        "what a saved model says its network, transform, loss or optimizer is",
        128,
    ),
    Target(
        "program",
        _program,
        lambda: [b"\x00\x00\x01", b"\x01\x01\x00\x00\x01\x02\x03\x01"],
        "a saved model's network as a list of operations",
        256,
        changes=1500,
    ),
    Target("images", _images, lambda: [b"\x00\x0c" + bytes(range(12))], "rows of Spark's image schema", 64),
)
