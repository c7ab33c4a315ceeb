"""The page's HTTP server: fixed files, a stream of updates, and counters for Prometheus; standard library only."""

from __future__ import annotations

import dataclasses
import hmac
import json
import math
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

from thinwire.dashboard.event_reducer import EventReducer, Reader
from thinwire.dashboard.prometheus import exposition
from thinwire.errors import ConfigError

NEWS_S, PING_S, POLL_S, DRAIN_S = 0.5, 5.0, 0.5, 3.0
MOST_STREAMS, MOST_DEPTH = 32, 32
MOST_CONNECTIONS = 256
"""Most simultaneous connections, streams included: each one is a thread in the process of the run."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANYWHERE = ("0.0.0.0", "::")
TOKEN = "THINWIRE_DASHBOARD_TOKEN"
"""Variable with a token that stays the same at each start, for monitoring systems."""
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
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class Source:
    """One run on the page: its state, and the function that reads its new events."""

    title: str
    poll: Callable[[], Any] = lambda: ()
    """Reads new events."""
    reducer: EventReducer = field(default_factory=EventReducer)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: str = ""
    """Why updates may be missing; empty where reading works."""
    heard: float = field(default_factory=time.monotonic)

    @property
    def quiet_s(self) -> float:
        """Seconds since the last new event."""
        return time.monotonic() - self.heard

    def take_in(self) -> None:
        """Feeds new events to the state, in small portions, so that readers of the state need not wait long."""
        events = iter(self.poll())
        while some := list(islice(events, 2000)):
            self.feed(some)

    def feed(self, events: list[dict[str, Any]]) -> None:
        with self.lock:
            for event in events:
                self.reducer.feed(event)
        self.heard = time.monotonic()


def token_for(host: str) -> str:
    """The environment's token; otherwise none for this machine, and a random one for other addresses."""
    return os.environ.get(TOKEN) or ("" if host in LOOPBACK else secrets.token_urlsafe(16))


class PageServer(ThreadingHTTPServer):
    """Serves a page about several runs until it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, sources: list[Source], host: str, port: int, token: str) -> None:
        self.sources, self.token = sources, token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if not token and host not in LOOPBACK:
            raise ConfigError(f"a page on {host} can be read by other machines; give it a token")
        self.streams = threading.Semaphore(MOST_STREAMS)
        self.connections = threading.Semaphore(MOST_CONNECTIONS)
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
        """The page's address with its token; a token from the environment is shown as the variable's name."""
        host, port = str(self.server_address[0]), int(self.server_address[1])
        shown = socket.getfqdn() if host in ANYWHERE else "localhost" if host in LOOPBACK else host
        token = f"${TOKEN}" if self.token and self.token == os.environ.get(TOKEN) else self.token
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/" + (f"?token={token}" if token else "")

    def start(self) -> PageServer:
        for thread in self._loops:
            thread.start()
        return self

    def close(self) -> None:
        """Ends the streams after their last updates, and releases the port."""
        self.closing.set()
        until = time.monotonic() + DRAIN_S
        for _ in range(MOST_STREAMS):
            self.streams.acquire(timeout=max(0.0, until - time.monotonic()))
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Refuses connections above the limit; browsers try again."""
        if self.connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of browsers that have disconnected."""

    def _poll(self) -> None:
        while not self.closing.is_set():
            for source in self.sources:
                try:
                    source.take_in()
                    source.error = ""
                except Exception as error:  # the store may be unreachable for a moment; the page shows the error
                    source.error = f"{type(error).__name__}: {error}"
            self.closing.wait(POLL_S)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    protocol_version = "HTTP/1.0"  # a connection for every answer, so that none outlives the server
    timeout = 20

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query, max_num_fields=16)
            allowed = self._may(query, public=asked.path in FILES and asked.path != "/")
            elsewhere = self._is_from_elsewhere()
        except ValueError:  # an invalid address or host name
            self._send(HTTPStatus.BAD_REQUEST, b"this is not an address\n")
            return
        if not allowed:
            self._send(HTTPStatus.FORBIDDEN, b"the token is missing or wrong: open the address that was printed\n")
        elif elsewhere:
            self._send(HTTPStatus.FORBIDDEN, b"another site's page may not read this one\n")
        elif asked.path in FILES:
            name, kind = FILES[asked.path]
            page = resources.files("thinwire.dashboard").joinpath("assets").joinpath(name).read_bytes()
            self._send(HTTPStatus.OK, page, kind)
        elif asked.path == "/metrics":
            told = exposition([(s.title, s.reducer, s.lock, s.quiet_s) for s in self.server.sources])
            self._send(HTTPStatus.OK, told.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif asked.path == "/stream":
            self._stream(query)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n")

    def do_HEAD(self) -> None:
        """Answers with the headers of GET."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of the standard library in this page's form, without repeating the request."""
        if code == HTTPStatus.NOT_IMPLEMENTED:  # an unsupported method
            code = HTTPStatus.METHOD_NOT_ALLOWED
        self._send(HTTPStatus(code), f"{HTTPStatus(code).phrase}\n".encode())

    def version_string(self) -> str:
        return "thinwire"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because addresses contain tokens."""

    def _may(self, query: dict[str, list[str]], *, public: bool) -> bool:
        if self.server.token:
            if public:  # static files of the wheel hold no secrets
                return True
            given = self.headers.get("Authorization", "").removeprefix("Bearer ") or query.get("token", [""])[0]
            return hmac.compare_digest(given.encode(), self.server.token.encode())
        try:
            # a host name of another site may resolve to this machine
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        return host in LOOPBACK

    def _is_from_elsewhere(self) -> bool:
        """Whether another site's page sent the request, by the browser's headers. It may link here, but not read."""
        site = self.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin"):
            framed = self.headers.get("Sec-Fetch-Dest") != "document"
            return framed or self.headers.get("Sec-Fetch-Mode") != "navigate"
        origin = self.headers.get("Origin")
        return origin is not None and urlsplit(origin).netloc != self.headers.get("Host")

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, query: dict[str, list[str]]) -> None:
        """Streams updates of all runs, and details of one, until the browser disconnects or the server closes."""
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"too many pages are open\n")
            return
        try:
            self.send_response(HTTPStatus.OK)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            if self.command == "HEAD":
                return
            self._tell(_number(query.get("run", ["0"])[0], len(self.server.sources)))
        except OSError:
            return
        finally:
            self.server.streams.release()

    def _went(self) -> bool:
        """Whether the browser has disconnected."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

    def _tell(self, detailed: int) -> None:
        readers = [Reader() for _ in self.server.sources]
        spoke = 0.0
        last = False
        while not last and not self._went():
            last = self.server.closing.is_set()
            runs = []
            for number, (source, reader) in enumerate(zip(self.server.sources, readers, strict=True)):
                with source.lock:
                    news = reader.news(source.reducer, detail=number == detailed)
                    if news is not None:
                        runs.append(_json({"run": number, "title": source.title, **news}))
            now = time.monotonic()
            if now - spoke > PING_S:  # tells the page that the server is alive, and the time since the last event
                for number, source in enumerate(self.server.sources):
                    runs.append(_json({"run": number, "quiet_s": source.quiet_s, "error": source.error}))
                spoke = now
            for line in runs:
                self.wfile.write(f"data: {line}\n\n".encode())
            self.wfile.flush()
            self.server.closing.wait(NEWS_S)


def _number(text: str, count: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) < count else 0


def _json(value: dict[str, Any]) -> str:
    """Encodes JSON for browsers: numbers that are not finite become null, and other objects their text."""
    return json.dumps(_plain(value), default=str, allow_nan=False)


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > MOST_DEPTH:  # only a malicious line is nested this deeply
        return None
    if isinstance(value, dict):
        return {str(key): _plain(one, depth + 1) for key, one in value.items()}
    return [_plain(one, depth + 1) for one in value] if isinstance(value, list | tuple) else value


def as_dict(event: Any) -> dict[str, Any]:
    """An event as a dictionary, as in `events.jsonl`."""
    found: dict[str, Any] = {"kind": event.kind, **dataclasses.asdict(event)}
    return found
