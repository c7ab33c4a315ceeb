"""The page's server: a few fixed files, one stream of news, and counters for Prometheus; from the standard library."""

from __future__ import annotations

import dataclasses
import hmac
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from thinwire.dashboard.prometheus import exposition
from thinwire.dashboard.story import Reader, Story
from thinwire.errors import ConfigError

NEWS_S, PING_S, POLL_S, DRAIN_S = 0.5, 10.0, 0.5, 3.0
MOST_STREAMS = 32
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class Source:
    """One run on the page: its story, and who brings news of it."""

    title: str
    poll: Callable[[], Any] = lambda: ()
    """Events that are new."""
    story: Story = field(default_factory=Story)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: str = ""

    def take_in(self) -> None:
        """Feeds what is new to the story, a little at a time so that who reads is not kept waiting."""
        events = iter(self.poll())
        while True:
            with self.lock:
                for _ in range(2000):
                    event = next(events, None)
                    if event is None:
                        return
                    self.story.feed(event)


class PageServer(ThreadingHTTPServer):
    """Serves a page on several runs until it is closed."""

    daemon_threads = True

    def __init__(self, sources: list[Source], host: str, port: int, token: str) -> None:
        self.sources, self.token = sources, token
        if not token and host not in LOOPBACK:
            raise ConfigError(f"a page on {host} can be read by others; give it a token")
        self.streams = threading.Semaphore(MOST_STREAMS)
        self.closing = threading.Event()
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"the dashboard cannot listen on {host}:{port}: {error}; give another port") from None
        self._loops = [
            threading.Thread(target=target, name=f"dashboard-{name}", daemon=True)
            for name, target in (("serve", self.serve_forever), ("poll", self._poll))
        ]

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), int(self.server_address[1])
        shown = "localhost" if host in LOOPBACK else host
        return f"http://{shown}:{port}/" + (f"?token={self.token}" if self.token else "")

    def start(self) -> PageServer:
        for thread in self._loops:
            thread.start()
        return self

    def close(self) -> None:
        """Ends the streams, which tell what is left first, and lets the port go."""
        self.closing.set()
        until = time.monotonic() + DRAIN_S
        for _ in range(MOST_STREAMS):
            self.streams.acquire(timeout=max(0.0, until - time.monotonic()))
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""

    def _poll(self) -> None:
        while not self.closing.is_set():
            for source in self.sources:
                try:
                    source.take_in()
                    source.error = ""
                except Exception as error:  # a store that is away for a moment; the page says so
                    source.error = f"{type(error).__name__}: {error}"
            self.closing.wait(POLL_S)


class Handler(BaseHTTPRequestHandler):
    """Answers one browser."""

    server: PageServer
    protocol_version = "HTTP/1.0"  # a connection for every answer: none outlives the server
    timeout = 60

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self._may(query, public=asked.path in FILES and asked.path != "/"):
            self._send(HTTPStatus.FORBIDDEN, b"the token is missing or wrong: open the address that was printed\n")
        elif asked.path in FILES:
            name, kind = FILES[asked.path]
            page = resources.files("thinwire.dashboard").joinpath("assets").joinpath(name).read_bytes()
            self._send(HTTPStatus.OK, page, kind)
        elif asked.path == "/metrics":
            told = exposition([(source.title, source.story, source.lock) for source in self.server.sources])
            self._send(HTTPStatus.OK, told.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif asked.path == "/stream":
            self._stream(query)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: tokens are in addresses."""

    def _may(self, query: dict[str, list[str]], *, public: bool) -> bool:
        if self.server.token:
            if public:  # the same for everyone, and in the wheel
                return True
            given = query.get("token", [""])[0]
            return hmac.compare_digest(given.encode(), self.server.token.encode())
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname  # another site's name may point here
        return host in LOOPBACK

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, query: dict[str, list[str]]) -> None:
        """News of all runs, and of one in detail, until the browser goes or the server does."""
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"too many pages are open\n")
            return
        try:
            self.send_response(HTTPStatus.OK)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            self._tell(_number(query.get("run", ["0"])[0], len(self.server.sources)))
        except OSError:
            return
        finally:
            self.server.streams.release()

    def _tell(self, detailed: int) -> None:
        readers = [Reader() for _ in self.server.sources]
        spoke = 0.0
        last = False
        while not last:
            last = self.server.closing.is_set()
            runs = []
            for number, (source, reader) in enumerate(zip(self.server.sources, readers, strict=True)):
                with source.lock:
                    news = reader.news(source.story, detail=number == detailed)
                    line = None if news is None else json.dumps({"run": number, "title": source.title, **news})
                if line is not None:
                    runs.append(line)
            now = time.monotonic()
            for line in runs:
                self.wfile.write(f"data: {line}\n\n".encode())
            if not runs and now - spoke > PING_S:
                self.wfile.write(b": still here\n\n")
            if runs or now - spoke > PING_S:
                self.wfile.flush()
                spoke = now
            self.server.closing.wait(NEWS_S)


def _number(text: str, count: int) -> int:
    return int(text) if text.isdecimal() and int(text) < count else 0


def as_dict(event: Any) -> dict[str, Any]:
    """An event as it stands in `events.jsonl`."""
    found: dict[str, Any] = {"kind": event.kind, **dataclasses.asdict(event)}
    return found
