"""What the driver is told by workers: a whole run's messages, some of them not as they must be."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from tests.fuzz.draw import Draw, as_sent
from tests.fuzz.target import Target
from thinwire import events
from thinwire.coordinator.coordinator import Coordinator
from thinwire.coordinator.outcome import Policy
from thinwire.coordinator.ports import Exit
from thinwire.errors import ConfigError, LostWorkersError, ProtocolError, ThinwireError
from thinwire.protocol.deadlines import Deadlines
from thinwire.protocol.handshake import hello
from thinwire.protocol.messages import Message
from thinwire.transport.reliable import Channel, ReliableHub

PROGRESS = {"rows": 8, "steps": 1, "busy": 1.0, "gap_s": 0.0, "position": [1, 0], "loss": 0.5, "stepped_s": 1.0}
PROGRESS |= {"waited_s": 0.1, "exchanged_s": 0.2, "note": {"rows": 8}, "first_loss": 1.0}
LANDED = {"round": 1, "steps": 2, "fragments": 1, "codec": "float32", "seconds": 0.1, "size_bytes": 10}
SAID: tuple[dict[str, Any], ...] = (
    {"t": "beat", "a": 0, "landed": 1, "bytes": 5, "received": 5, "refused": 0, "waiting": {}, "progress": PROGRESS},
    {"t": "beat", "a": 0, "landed": 1, "bytes": 5, "received": 0, "refused": 0, "waiting": {"train:1": [1]}}
    | {"progress": PROGRESS},
    {
        "t": "evaluated",
        "a": 0,
        "p": 1,
        "sums": {"loss": 2.0},
        "weights": {"loss": 4.0},
        "rows": 4,
        "steps": 1,
        "done": 8,
    },
    {
        "t": "saved",
        "a": 0,
        "name": "000001-step-4",
        "steps": 4,
        "parts": [{"name": "joint", "size_bytes": 1, "digest": "0" * 64}],
        "fails": False,
    },
    {"t": "epoch", "a": 0, "epoch": 1, "rows": 8, "loss": 0.5},
    {"t": "event", "a": 0, "kind": "round_landed", "fields": {**LANDED, "contributors": [0, 1]}},
    {
        "t": "event",
        "a": 0,
        "kind": "setting_changed",
        "fields": {"since": 1, "setting": {}, "latency_s": 0.1, "bytes_per_s": 1.0, "step_s": None, "why": "so"},
    },
    {
        "t": "event",
        "a": 0,
        "kind": "tried",
        "fields": {
            "steps": 1,
            "joint": 1.0,
            "replicas": 1.0,
            "best": 1.0,
            "joint_there": 1.0,
            "alone": None,
            "joint_beside": None,
            "hurts": "",
        },
    },
    {"t": "caught", "a": 0, "published": 1},
    {"t": "finished", "a": 0},
    {"t": "result", "a": 0, "part": 0, "i": 0, "n": 1, "chunk": 0, "chunks": 1},
    {"t": "apart", "a": 0, "n": 1, "why": "x"},
    {"t": "bye", "a": 0},
    {"t": "failed", "a": 0, "kind": "ValueError", "error": "ValueError: x", "traceback": "…"},
    {"t": "join", "a": 0, "address": "memory:0.0", "rows": 8, **hello()},
    {"t": "fetch", "a": 0, "name": "train", "i": 0},
    {"t": "prepared", "a": 0, "g": 1, "landed": 0, "fresh": True, "since": 0, "digest": "d", "more": {}},
)


class _Script:
    """Hub, workforce and clock in one: workers join as they should, and then say what was drawn."""

    revives = False
    refused = 0

    def __init__(self, messages: list[Message]) -> None:
        self.moment, self.messages, self.early = 0.0, messages, 0
        self.inbox = [Message(w, {**as_sent(SAID[14])}) for w in range(2)]

    def now(self) -> float:
        return self.moment

    def receive(self, timeout_s: float) -> list[Message]:
        self.moment += 0.1
        found, self.inbox = self.inbox, []
        if not found:
            found, self.messages = self.messages[:1], self.messages[1:]
        return found

    def send(self, worker: int, attempt: int, header: dict[str, Any], payload: memoryview | None = None) -> None:
        assert type(attempt) is int
        if header["t"] == "prepare":
            self.inbox.append(Message(worker, {**as_sent(SAID[16]), "g": header["g"]}))

    def broken(self) -> list[tuple[int, int]]:
        return []

    def notices(self) -> list[events.Event]:
        return []

    def exits(self) -> list[Exit]:
        return []

    def replace(self, worker: int, attempt: int) -> bool:
        return False

    def piece(self, worker: int, name: str, index: int) -> tuple[bytes, int]:
        return b"rows", 1


class _DoneError(Exception):
    """All has been said."""


def _committed(name: str, step: int, parts: object, meta: object) -> Future[int]:
    done: Future[int] = Future()
    done.set_result(step + len(name))
    return done


def _coordinator(data: bytes) -> None:
    draw, messages = Draw(data), []
    while draw.more and len(messages) < 6:
        header = as_sent(draw.changed(draw.pick(SAID)))
        payload = memoryview(b"some") if draw.byte() % 2 else None
        messages.append(Message(draw.pick((0, 1, 2, -1)), header, payload))
    script = _Script([m for m in messages if isinstance(m.header.get("t"), str)])  # as the wire lets through
    _serve(script, script, any(m.header["t"] == "failed" for m in script.messages))


def _serve(hub: Any, script: _Script, meant: bool) -> None:
    policy = Policy(2, deadlines=Deadlines(settle_s=0.0), min_workers=0)
    log: list[str] = []

    def emit(event: events.Event) -> None:
        log.append(event.to_json())

    def turn() -> None:
        if not script.messages and not script.inbox:
            raise _DoneError

    coordinator = Coordinator(hub, script, policy, emit=emit, commit=_committed, serve=script.piece, time=script)
    try:
        coordinator.run(turn)
    except _DoneError:
        coordinator._summed()
    except (ConfigError, LostWorkersError, ProtocolError):
        pass  # what is well-formed may say that nobody holds the joint model, or come from another run or thinwire
    except ThinwireError:
        if not meant:
            raise


class _Marked(_Script):
    """The same behind `ReliableHub`: what is said has marks, and those whom the coordinator expects say theirs well."""

    address = "tcp://127.0.0.1:5"

    def __init__(self, messages: list[Message]) -> None:
        super().__init__(messages)
        self.channels = {worker: Channel() for worker in range(2)}

    def receive(self, timeout_s: float) -> list[Message]:
        true = bool(self.inbox)
        found = super().receive(timeout_s)
        return [m._replace(header=self.channels[m.sender].number(m.header, None)) for m in found] if true else found


def _driver(data: bytes) -> None:
    draw, messages = Draw(data), list[Message]()
    while draw.more and len(messages) < 6:
        if messages and draw.byte() % 8 == 7:
            messages.append(draw.pick(messages))  # said again
            continue
        mark = {"m": [draw.byte(), draw.byte() % 4, draw.byte() % 4], "q": draw.byte() % 16}
        header = as_sent(draw.changed({**draw.pick(SAID), **mark, "a": draw.pick((0, 0, 0, 1, 2**62))}))
        payload = memoryview(b"some") if draw.byte() % 2 else None
        messages.append(Message(draw.pick((0, 1, 0, 1, 2, 10**17)), header, payload))
    sane = [m for m in messages if isinstance(m.header.get("t"), str) and type(m.header.get("a", 0)) is int]
    script = _Marked(sane)
    _serve(ReliableHub(script), script, any(m.header["t"] == "failed" for m in sane))


def _driver_seeds() -> list[bytes]:
    return [bytes([50, 0, 0, 3, kind, attempt, 0, 0, worker]) * 2 for kind in range(len(SAID)) for attempt in (0, 3)
            for worker in (0, 4)]  # fmt: skip


def _seeds() -> list[bytes]:
    return [bytes([kind, 0, 1, worker]) * 2 for kind in range(len(SAID)) for worker in (0, 1)] + [
        bytes([2, 0, 0, 0, 2, 0, 0, 1, 3, 0, 0, 0, 3, 0, 0, 1, 4, 0, 0, 0, 5, 0, 0, 0])
    ]


TARGETS = (
    Target("coordinator", _coordinator, _seeds, "what the driver hears from workers", 96, changes=1000),
    Target("driver", _driver, _driver_seeds, "the same, with the marks of what was said and heard", 96, changes=500),
)
