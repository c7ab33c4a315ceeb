"""What workers are sent by each other: frames, messages of rounds, of a mesh and of a table, packed vectors."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import queue
from collections.abc import Mapping
from typing import Any

import torch
import zmq

from tests.fuzz.draw import Draw, as_sent
from tests.fuzz.target import Target
from thinwire.checkpoint import decode, encode
from thinwire.errors import ProtocolError, TimedOutError
from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.peer import Peer
from thinwire.exchange.round import Lane, Launch, cut
from thinwire.exchange.rounds import Rounds
from thinwire.exchange.slices import SliceSumming
from thinwire.exchange.snapshot import snapshot_of
from thinwire.exchange.table.table import on_table
from thinwire.parameters import Fragment
from thinwire.protocol.clock import RealTime
from thinwire.protocol.messages import COORDINATOR, Message
from thinwire.replicas.torch import TorchReplica, TrainSpec
from thinwire.rules.compression import CODECS, codec, warm_up
from thinwire.strategies import EASGD, MPCA, Relay, SparkNet
from thinwire.transport import zmq as wire
from thinwire.worker.local_model import Origin
from thinwire.worker.plan import WorkerPlan
from thinwire.worker.worker import Worker

SIZE = 600
BEAT = {"t": "beat", "a": 0, "landed": 3, "bytes": 10, "waiting": {"train:1": [1]}}


# -- frames -----------------------------------------------------------------------------------------------------------


def _wire(data: bytes) -> None:
    draw = Draw(data)
    skip = draw.byte() % 2
    identity = draw.pick((b"0.0", b"1.7", b"-1.0", b"", b"\x00abcd", b" 1", b"1_0", b"9" * 5000, b"x.y"))
    body = draw.byte() % 4
    raw = draw.byte() % 2
    headers = [draw.rest() if raw else json.dumps(draw.changed(BEAT)).encode()] if body else []
    frames = [zmq.Frame(f) for f in ([identity] * skip + headers + [b"payload"] * (body - 1 if body else 0))]
    found = wire._parse(frames, skip)
    if found is not None:
        assert isinstance(found.header["t"], str)
        assert type(found.header.get("a", 0)) is int
        assert found.sender >= 0 if skip else found.sender == COORDINATOR, "a worker is not the coordinator"


def _wire_seeds() -> list[bytes]:
    text = json.dumps(BEAT).encode()
    return [b"\x01\x00\x01\x01" + text, b"\x00\x00\x02\x01" + text, b"\x01\x01\x01\x00", b"\x01\x02\x01\x01" + text[:9]]


# -- rounds -----------------------------------------------------------------------------------------------------------

PART = {"t": "part", "g": 1, "a": 0, "r": "train:0", "s": [0, SIZE], "k": "float32", "c": 0, "w": 1.0, "n": {"rows": 5}}
SUM = {"t": "sum", "g": 1, "a": 0, "r": "train:0", "s": [0, SIZE], "k": "float32", "c": 1, "i": [0, 1, 2], "n": {}}
OPEN = {"t": "open", "g": 1, "a": 0, "r": "train:1", "s": [0, SIZE], "k": "int8", "c": 0}
SLICES = [f.size for f in (Fragment(0, 256), Fragment(256, 512), Fragment(512, SIZE))]
LENGTHS = (
    None,
    4 * SLICES[0],
    4 * SLICES[2],
    4 * SIZE,
    0,
    3,
    codec("int8").size_bytes(256),
    codec("int4").size_bytes(256),
)


def _payload(draw: Draw) -> memoryview | None:
    length = draw.pick(LENGTHS)
    return None if length is None else memoryview(bytearray(draw.bytes(8) * (length // 8 + 1))[:length])


@functools.cache
def _warm() -> None:
    """Compiles what packs and unpacks, which would pass for an input that takes long."""
    for each in CODECS.values():
        warm_up(each)


def _machine(residuals: torch.Tensor) -> Rounds:
    def lane(key: str, name: str) -> Lane:
        chosen = codec(name)
        return Lane(chosen, residuals[0], residuals[1], True) if chosen.lossy else Lane(chosen)

    summing = SliceSumming(0, lambda peer, body, payload: None, quorum=0.5, clock=lambda: 0.0)
    return Rounds(0, summing, lane, longest=1 << 14, clock=lambda: 0.0)


def _rounds(data: bytes) -> None:
    _warm()
    draw = Draw(data)
    machine = _machine(torch.zeros(2, SIZE))
    machine.configure(1, {0: 0, 1: 0, 2: 0})
    own = draw.pick(("float32", "int8", ""))
    if own:
        machine.launch(Launch("train:0", Fragment(0, SIZE), own, torch.ones(SIZE), 1.0, {}))
    for _ in range(5):
        if not draw.more:
            break
        header, sender = draw.changed(draw.pick((PART, SUM, OPEN))), draw.pick((1, 2, 0, 9))
        machine.receive(sender, as_sent(header), _payload(draw))
        machine.summed()
    machine.tick()
    machine.waiting_for()
    assert sum(fragment.size for _, fragment, _ in machine.wanted()) <= 64 << 14
    machine.configure(2, {0: 0, 1: 1})


def _rounds_seeds() -> list[bytes]:
    part, total, opens = b"\x00\x00\x00\x01abcdefgh", b"\x01\x00\x00\x01abcdefgh", b"\x02\x00\x00\x00"
    return [b"\x00" + part, b"\x00" + total, b"\x01" + opens + part, b"\x02" + opens + total + part]


# -- a member of a mesh, and of a table -------------------------------------------------------------------------------


class _Link:
    """Hands a member what it is to hear, and swallows what it says."""

    address, refused = "nowhere", 0

    def __init__(self) -> None:
        self.ready: list[Message] = []

    def connect(self, peers: Mapping[int, str]) -> None: ...

    def send(self, peer: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
        json.dumps(header)

    def receive(self, timeout_s: float) -> list[Message]:
        found, self.ready = self.ready, []
        return found

    def traffic(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


TREES = TreeCodec(encode, decode)
MEMBERS = {str(w): {"address": f"memory:{w}.0", "attempt": 0} for w in range(3)}
COMMIT = {"t": "commit", "g": 1, "members": MEMBERS, "reference": 1, "landed": 0, "digest": "same", "since": 0}
COMMIT |= {"rows": 10, "totals": {}, "more": {}}
NOTE = {"rows": 5, "setting": {"fragments": 2}, "since": 1, "publish": 1}


def _begun(member: Member, link: _Link, digest: str, more: dict[str, Any]) -> None:
    member.standing.digest = digest
    link.ready = [Message(COORDINATOR, as_sent(COMMIT | more))]
    member.turn()


def _tree(values: Any) -> dict[str, Any]:
    joint = JointState(MPCA(), torch.ones(SIZE), 3)
    return {"joint": joint.tree() | {"landed": 0}, "published": 1, "went": [0, 0], "best": None, **values}


def _mesh(data: bytes) -> None:
    _warm()
    draw, link = Draw(data), _Link()
    joint = JointState(MPCA(), torch.zeros(SIZE), 3)
    member = Member(link, Identity(0, 0, {}), joint, codec_name="float32", trees=TREES)
    behind = draw.byte() % 2
    _begun(member, link, "other" if behind else "same", {})
    if not behind:
        launching = member.training.launching
        number, fragment = launching.claim()
        launching.launch(number, fragment, torch.ones(fragment.size), 1.0, {})
    whole = list(joint.fragment(0))
    for _ in range(4):
        if not draw.more:
            break
        kind = draw.byte() % 5
        if kind == 4:
            header: Any = {"t": "state", "g": 1, "a": 0, "i": 0, "n": 1}
            tree = draw.changed(_tree({})) if draw.byte() % 4 else draw.value()
            payload: memoryview | None = memoryview(encode(tree))
        else:
            true = ({**PART, "s": whole, "n": NOTE}, {**SUM, "s": whole, "n": {"1": NOTE}}, OPEN, {"t": "want", "g": 1})
            header, payload = true[kind], _payload(draw)
        link.ready = [Message(draw.pick((1, 2)), as_sent(draw.changed(header)), payload)]
        member.turn()
    link.ready = [Message(COORDINATOR, {"t": "prepare", "g": 2})]
    member.turn()
    assert joint.model is not None
    assert joint.model.shape == (SIZE,)


def _mesh_seeds() -> list[bytes]:
    part, total = b"\x00\x00\x01abcdefgh\x00\x00", b"\x01\x00\x01abcdefgh\x00\x00"
    state = b"\x04\x01\x00\x00\x00"
    return [b"\x00" + part + total, b"\x01" + state, b"\x01\x02\x00\x00\x00" + state, b"\x00\x03\x00\x00\x00" + part]


class _Rows:
    num_rows = batches_per_epoch = 8

    def validation(self) -> list[Any]:
        return []


class _Queue(queue.SimpleQueue[Any]):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return self.get_nowait()


class _Leaping(RealTime):
    """Time that passes when it is looked at: nothing is waited for."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:  # type: ignore[override]
        self.moment += 1.0
        return self.moment

    def queue(self) -> Any:
        return _Queue()


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


SPEC = TrainSpec(loss="mse", optimizer=functools.partial(torch.optim.SGD, lr=0.1), device="cpu")
STRATEGIES: tuple[Any, ...] = (MPCA(), SparkNet(period=1), Relay())


def _heed(worker: Worker) -> None:
    with contextlib.suppress(TimedOutError):  # a verdict was asked for, and there is no coordinator
        worker.inbox.take_signals(0.0)


def _worker(data: bytes) -> None:
    """A member of a mesh as above, and behind it the loop that steps, which takes up what it says."""
    _warm()
    draw, link = Draw(data), _Link()
    replica = TorchReplica(_network(), SPEC, 0)
    joint = JointState(draw.pick(STRATEGIES), replica.vector.detach().clone(), 3)
    settings: dict[str, Any] = {"codec_name": draw.pick(("float32", "int8")), "trees": TREES}
    settings |= {"time": _Leaping(), "silence_s": math.inf}
    peer = Peer(link, Identity(0, 0, {}), joint, **settings)
    plan = WorkerPlan(worker=0, attempt=0, epochs=1, steps=None, evaluates=True, checkpoint_every=2, keeps_best=True)
    worker = Worker(plan, replica, _Rows(), peer, joint, lambda *part: None)
    behind = draw.byte() % 2
    _begun(peer.member, link, "other" if behind else "same", {})
    _heed(worker)
    size, whole = joint.size, list(joint.fragment(0))
    if not behind:
        replica.vector.detach().add_(1.0)
        worker.local.origin = Origin.STEPS
        worker.meter.steps += 1
        number, fragment = peer.claim()
        snapshot = snapshot_of(fragment.of(replica.vector).detach(), worker.rounds.spares)
        worker.rounds.launch(number, fragment, snapshot, 1.0)
    tree = {"joint": joint.tree(), "buffers": replica.buffers.vector(), "counts": replica.buffers.counts()}
    tree |= {"schedule": replica.schedule(), "published": 1, "went": [0, 0], "best": None, "replica": replica.shared()}
    payloads = [
        None,
        *(bytes(n) for chunk in cut(Fragment(*whole), range(3), 32) for n in [4 * (chunk.stop - chunk.start)]),
    ]
    for _ in range(6):
        if not draw.more:
            break
        kind = draw.byte() % 6
        if kind == 4:
            header: Any = {"t": "state", "g": 1, "a": 0, "d": 1, "i": 0, "n": 1}
            payload: Any = encode(draw.changed(tree))
        else:
            sums = {"s": whole, "c": draw.byte() % 3}
            true = (
                {**PART, **sums, "n": NOTE | {"evaluate": True}},
                {**SUM, **sums, "n": {"1": NOTE | {"save": 5}, "2": {"stop": "so"}}},
                {**OPEN, **sums},
                {"t": "want", "g": 1, "a": 0},
                {},
                {**PART, "r": "buffers:1", "s": [0, 8]},
            )
            header, payload = true[kind], draw.pick(payloads)
        said = Message(
            draw.pick((1, 2)),
            as_sent(draw.changed(header)),
            None if payload is None else memoryview(bytearray(payload)),
        )
        for _ in range(1 + draw.byte() % 2):  # said again, now and then
            link.ready = [said] if isinstance(said.header.get("t"), str) else []
            peer.member.turn()
            _heed(worker)
    link.ready = [Message(COORDINATOR, {"t": "prepare", "g": 2})]
    peer.member.turn()
    _heed(worker)
    assert joint.model is not None
    assert joint.model.shape == replica.vector.shape == (size,)


def _worker_seeds() -> list[bytes]:
    head = [bytes([strategy, codec_, behind]) for strategy in range(3) for codec_ in (0, 1) for behind in (0, 1)]
    round_ = b"".join(bytes([kind, chunk, payload, worker, 0, 0]) for kind, chunk, payload, worker in
                      ((0, 0, 1, 0), (0, 0, 1, 1), (1, 1, 2, 0), (1, 2, 3, 1)))  # fmt: skip
    return [first + rest for first in head for rest in (round_, b"\x04\x00\x00\x00\x00", b"\x03\x00\x00\x00\x00\x00")]


TUPLE = 100
UPDATE = {"t": "update", "g": 1, "a": 0, "k": 0, "n": 0, "w": 1.0, "rates": [0.1], "absent": [0]}
UPDATE |= {"over": False}
SAID: tuple[dict[str, Any], ...] = (
    UPDATE,
    {"t": "get", "g": 1, "a": 0, "k": 0},
    {"t": "value", "g": 1, "a": 0, "k": 1},
    {"t": "mark", "g": 1, "a": 0, "p": [1, 1], "n": {"publish": 1, "save": 5}},
    {"t": "page", "g": 1, "a": 0, "k": 0, "p": [1, 1], "whole": False},
    {"t": "page", "g": 1, "a": 0, "k": 0, "p": [1, 1], "whole": True},
    {"t": "have", "g": 1, "a": 0, "p": [1, 1]},
    {"t": "go", "g": 1, "a": 0, "p": [1, 1]},
    {"t": "move", "g": 1, "a": 0, "k": 0},
    {"t": "moved", "g": 1, "a": 0, "k": 0},
    {"t": "copy", "g": 1, "a": 0, "k": 0, "v": [1, 0]},
    {"t": "note", "g": 1, "a": 0, "n": {"rows": 5}},
    {"t": "done", "g": 1, "a": 0, "d": True},
    {"t": "reply", "g": 1, "a": 0, "k": 1, "n": 0, "v": 1, "to": 0, "e": False},
)
ANSWER = {"since": 0, "line": 0, "live": [], "due": [], "still": [], "kept": {}, "went": [0, 0]}


def _table(data: bytes) -> None:
    draw, link = Draw(data), _Link()
    joint = JointState(EASGD(tuple_size=TUPLE, servers="spread"), torch.zeros(3 * TUPLE), 3)
    kind = on_table(workers=3)
    member = Member(link, Identity(0, 0, {}), joint, codec_name="float32", trees=TREES, kind=kind)
    launching = member.training.launching
    try:
        more = {str(w): ANSWER for w in range(3)}
        _begun(member, link, "same", {"more": more, "reference": draw.byte() % 2})
        member.training.viewing.open(1, torch.zeros(3 * TUPLE))
        number, fragment = launching.claim()
        launching.launch(number, fragment, torch.ones(3 * TUPLE), 1.0, {"rows": 1})
        for _ in range(5):
            if not draw.more:
                break
            header = draw.changed(draw.pick(SAID))
            act = draw.byte() % 3
            if act == 2:
                tree = {"state": [torch.ones(TUPLE)], "version": 1, "merged": {"1": [0, 0]}}
                payload: memoryview | None = memoryview(encode(draw.changed(tree)))
            else:
                payload = memoryview(bytearray(draw.bytes(4) * TUPLE)) if act else None
            link.ready = [Message(draw.pick((1, 2, 0)), as_sent(header), payload)]
            member.turn()
        link.ready = [Message(COORDINATOR, {"t": "prepare", "g": 2})]
        member.turn()
    finally:
        member.close()
    assert joint.model is not None
    assert joint.model.shape == (3 * TUPLE,)


def _table_seeds() -> list[bytes]:
    each = [bytes([0, kind, 0, act, 65, 66, 67, 68, 0]) for kind in range(len(SAID)) for act in (1, 2)]
    return [*each, bytes([0, 3, 0, 0, 0, 4, 0, 1, 1, 2, 3, 4, 1, 7, 0, 0, 0])]


# -- packed vectors ---------------------------------------------------------------------------------------------------


def _codecs(data: bytes) -> None:
    _warm()
    draw = Draw(data)
    chosen, count = draw.pick(list(CODECS.values())), draw.byte() + 256 * (draw.byte() % 4)
    packed, right = draw.rest(), chosen.size_bytes(count)
    if (draw and len(packed) > right) or data[:1] < b"\x80":
        packed = packed[:right].ljust(right, b"\x00")
    given = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
    total = torch.ones(count)
    try:
        chosen.accumulate(given, 0.5, total)
        values = chosen.decode(given, count)
        assert len(packed) == right
        assert values.shape == (count,)
    except ProtocolError:
        assert len(packed) != right


def _codecs_seeds() -> list[bytes]:
    found = []
    for index, (name, count) in enumerate([(n, c) for n in CODECS for c in (0, 1, 255, 256, 300)]):
        values = torch.linspace(-3, 3, count)
        head = bytes([index // 5, count % 256, count // 256])
        found.append(head + codec(name).encode(values).numpy().tobytes())
    return found


TARGETS = (
    Target("wire", _wire, _wire_seeds, "frames of the wire, of workers and of the coordinator"),
    Target("rounds", _rounds, _rounds_seeds, "messages of rounds", 128),
    Target(
        "mesh", _mesh, _mesh_seeds, "what a member of a mesh hears from its peers, with joint states", 128, changes=500
    ),
    Target(
        "table", _table, _table_seeds, "what a member of a table hears from its peers, with tuples", 128, changes=300
    ),
    Target(
        "worker",
        _worker,
        _worker_seeds,
        "what a worker's loop makes of what its peers say, with joint states",
        160,
        changes=300,
    ),
    Target("codecs", _codecs, _codecs_seeds, "packed vectors, in every codec", 2048),
)
