"""What the dashboard reads: a run's events, and what browsers ask."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

from tests.fuzz.draw import Draw
from tests.fuzz.target import Target
from thinwire.dashboard.event_reducer import EventReducer, Reader
from thinwire.dashboard.follow import Follower
from thinwire.dashboard.prometheus import exposition
from thinwire.dashboard.server import Handler, Source, _json

EVENTS: tuple[dict[str, Any], ...] = (
    {
        "kind": "run_started",
        "time": 1.0,
        "strategy": "mpca",
        "knobs": {},
        "workers": 2,
        "rows": 10,
        "seed": 0,
        "resumed_from": None,
    },
    {"kind": "worker_joined", "time": 2.0, "worker": 0, "attempt": 0, "host": "a", "pid": 1, "rows": 5, "again": True},
    {"kind": "worker_lost", "time": 3.0, "worker": 0, "attempt": 0, "host": "a", "reason": "gone\nfar", "steps": 4},
    {"kind": "worker_failed", "time": 3.0, "worker": 0, "attempt": 0, "host": "a", "error": "x", "traceback": "y"},
    {"kind": "generation_formed", "time": 2.5, "generation": 1, "members": [0, 1], "reference": 0, "landed": 0},
    {
        "kind": "round_stalled",
        "time": 4.0,
        "worker": 0,
        "host": "a",
        "rounds": ["train:1"],
        "waited_for": [1],
        "seconds": 2.0,
    },
    {
        "kind": "progressed",
        "time": 5.0,
        "worker": 0,
        "attempt": 0,
        "steps": 4,
        "rows": 9,
        "epoch": 1,
        "loss": 0.5,
        "busy": 0.9,
        "gap_s": 0.1,
        "landed": 1,
        "bytes_sent": 10,
        "bytes_received": 10,
        "stepped_s": 1.0,
        "waited_s": 0.0,
        "exchanged_s": 0.5,
    },
    {
        "kind": "round_landed",
        "time": 5.5,
        "round": 1,
        "fragments": 2,
        "codec": "int8",
        "seconds": 0.1,
        "fragment": 0,
        "late": 1,
        "period": 4,
    },
    {"kind": "setting_changed", "time": 6.0, "since": 1, "setting": {}, "why": "so"},
    {
        "kind": "tried",
        "time": 6.5,
        "steps": 4,
        "joint": 1.0,
        "replicas": 1.1,
        "best": 1.0,
        "alone": None,
        "hurts": "much",
    },
    {"kind": "evaluated", "time": 7.0, "number": 1, "epoch": 1.0, "steps": 4, "rows": 9, "metrics": {"loss": 0.5}},
    {"kind": "checkpoint_saved", "time": 7.5, "name": "x", "steps": 4, "size_bytes": 9},
    {"kind": "run_ended", "time": 9.0, "reason": "done", "summary": {"steps": 4}},
)


def _told(events: list[dict[str, Any]]) -> None:
    story, reader = EventReducer(), Reader()
    for event in events:
        story.feed(event)
        reader.news(story, detail=False)
    f"data: {_json({'run': 0, 'all': Reader().news(story), 'new': reader.news(story)})}\n\n".encode()
    exposition([("run", story, threading.Lock(), 0.0)]).encode()


def _story(data: bytes) -> None:
    draw, events = Draw(data), []
    while draw.more and len(events) < 8:
        events.append(json.loads(json.dumps(draw.changed(draw.pick(EVENTS)))))
    _told(events)


def _lines(data: bytes) -> None:
    follower = Follower.__new__(Follower)
    _told(list(follower._parsed(data.split(b"\n"), 1.0)))


class _Server:
    """As much of a page's server as an answer needs."""

    def __init__(self, token: str) -> None:
        self.token, self.sources = token, [Source("run")]
        self.streams, self.closing = threading.Semaphore(1), threading.Event()
        self.closing.set()


class _Browser(Handler):
    """An answer to some bytes, without a socket."""

    def __init__(self, data: bytes, token: str) -> None:
        self.rfile, self.wfile = io.BytesIO(data), io.BytesIO()  # type: ignore[assignment]
        self.server = _Server(token)  # type: ignore[assignment]
        self.client_address = ("127.0.0.1", 1)
        self.handle()

    def _went(self) -> bool:
        return False


def _http(data: bytes) -> None:
    draw = Draw(data)
    token = draw.pick(("", "secret"))
    answer = _Browser(draw.rest(), token).wfile.getvalue()
    if token and b"secret" not in data:
        assert b"data: " not in answer, "who has no token reads nothing"


def _http_seeds() -> list[bytes]:
    asked = [b"/", b"/page.js", b"/metrics", b"/stream?run=0", b"/stream?run=99&token=secret", b"/x"]
    return [
        *(b"\x00GET %s HTTP/1.1\r\nHost: localhost:1\r\n\r\n" % path for path in asked),
        *(b"\x01GET %s HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n" % path for path in asked),
        b"\x00GET http://[::1]:1/ HTTP/1.1\r\nHost: [::1]:1\r\n\r\n",
    ]


def _lines_seeds() -> list[bytes]:
    texts = [json.dumps(event).encode() for event in EVENTS]
    return [*(b"\n".join(texts[i : i + 3]) for i in range(0, len(texts), 3)), b'{"kind": "cut off']


TARGETS = (
    Target(
        "story",
        _story,
        lambda: [bytes([k, 0]) for k in range(len(EVENTS))] + [bytes([k // 2 * (k % 2 == 0) for k in range(26)])],
        "events of a run, folded into a page",
        128,
    ),
    Target(
        "lines",
        _lines,
        _lines_seeds,
        "lines of events.jsonl",
        1024,
        (b'"time": ', b'{"kind": "', b"1e400", b"NaN", b"null", b"[[[["),
    ),
    Target(
        "http",
        _http,
        _http_seeds,
        "what browsers ask of the page",
        512,
        (b"GET ", b"HTTP/1.1\r\n", b"Host: ", b"token=", b"[", b"%00", b"/stream", b"Authorization: Bearer "),
    ),
)
