"""The dashboard against other sites' pages, and against what a run's log may hold."""

from __future__ import annotations

import hmac
import http.client
import http.server
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from tests.dashboard.logs import events, write
from thinwire.dashboard import serve
from thinwire.dashboard.server import MOST_CONNECTIONS, PageServer

from .surroundings import poll

EVERY = ("/", "/page.js", "/charts.js", "/page.css", "/icon.svg", "/metrics", "/stream", "/nothing")
PAYLOADS = (
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "\"><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    found = serve([str(write(tmp_path_factory.mktemp("run"), events(2, 20, lost=1)))])
    yield found
    found.close()


def ask(
    server: PageServer, path: str, method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(host, server.server_address[1], timeout=600)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read1(2000) if path.startswith("/stream") else answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", EVERY)
def test_every_answer_says_what_browsers_may_do_with_it(server: PageServer, path: str) -> None:
    _, headers, _ = ask(server, path)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer", "the token is in the address"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == headers["Cross-Origin-Opener-Policy"] == "same-origin"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize("path", EVERY)
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": ""},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
    ],
    ids=str,
)
def test_another_site_s_page_reads_nothing(server: PageServer, path: str, headers: dict[str, str]) -> None:
    status, _, body = ask(server, path, **headers)
    assert status == 403
    assert b"thinwire_" not in body
    assert len(body) < 100


def test_a_link_from_elsewhere_and_the_page_s_own_requests_are_answered(server: PageServer) -> None:
    led = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert ask(server, "/", **led)[0] == 200
    own = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
    for path in ("/stream", "/metrics", "/page.js"):
        assert ask(server, path, **own)[0] == 200
    here = f"localhost:{server.server_address[1]}"
    assert ask(server, "/metrics", Host=here, Origin=f"http://{here}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "BREW"])
def test_only_reading_is_possible(server: PageServer, method: str) -> None:
    status, headers, body = ask(server, "/metrics", method, X_Mark="repeat-me")
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"repeat-me" not in body
    assert b"BREW" not in body


@pytest.mark.parametrize("path", EVERY[:-1])
def test_head_is_get_without_a_body(server: PageServer, path: str) -> None:
    status, headers, body = ask(server, path, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["Content-Type"] == ask(server, path)[1]["Content-Type"]


@pytest.mark.parametrize(
    "said",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(200)) + b"\r\n",
        b"GET / HTTP/1.0\r\nHost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\0" * 300 + b"\r\n\r\n",
        b"GET //[ HTTP/1.0\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: [::\r\n\r\n",
        b"GET /stream?run=" + b"9" * 5000 + b" HTTP/1.0\r\nHost: evil\r\n\r\n",
    ],
    ids=["a long address", "many headers", "a long header", "no request", "no address", "no host", "a long number"],
)
def test_requests_past_all_measure_are_refused_and_the_next_one_is_answered(server: PageServer, said: bytes) -> None:
    with socket.create_connection(server.server_address[:2], timeout=600) as guest:
        guest.sendall(said)
        answer = guest.makefile("rb").readline()
    assert re.match(rb"HTTP/1\.0 4\d\d |Bad Request", answer), answer
    assert ask(server, "/metrics")[0] == 200


def test_a_body_is_never_read(server: PageServer) -> None:
    with socket.create_connection(server.server_address[:2], timeout=600) as guest:
        guest.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert guest.makefile("rb").readline().startswith(b"HTTP/1.0 200")


def test_connections_are_limited_and_given_back(server: PageServer) -> None:
    held = [socket.create_connection(server.server_address[:2], timeout=600) for _ in range(MOST_CONNECTIONS + 50)]

    def full() -> bool:
        free = server.connections.acquire(blocking=False)
        if free:
            server.connections.release()
        return not free

    poll(full)
    threads = sum(thread.name.startswith("Thread") for thread in threading.enumerate())
    assert threads <= MOST_CONNECTIONS + 20
    for one in held:
        one.close()

    def answered() -> bool:
        try:
            return ask(server, "/metrics")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    poll(answered)


def test_a_token_of_the_environment_is_asked_for_on_this_machine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of it reach localhost as well."""
    monkeypatch.setenv("THINWIRE_DASHBOARD_TOKEN", "mine-alone")
    server = serve([str(write(tmp_path / "a", events(1, 2)))])
    try:
        assert [ask(server, path)[0] for path in ("/", "/metrics", "/stream")] == [403] * 3
        assert ask(server, "/metrics?token=mine-alone")[0] == 200
    finally:
        server.close()


def test_a_token_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    server = serve([str(write(tmp_path / "a", events(1, 2)))], "127.0.0.1", 0, token="a-token-of-mine")
    try:
        for path in ("/", "/metrics", "/stream"):
            assert ask(server, path)[0] == 403
            assert ask(server, f"{path}?token=wrong")[0] == 403
        assert ask(server, "/metrics", Authorization="Bearer a-token-of-mine")[0] == 200
        assert len(compared) == 7
        assert all(right == b"a-token-of-mine" for _, right in compared)
    finally:
        server.close()


def hostile(text: str) -> Iterator[dict[str, Any]]:
    """A run whose log says the same everywhere that a log can say something."""
    for event in events(2, 12, lost=1):
        changed = dict(event)
        for key in ("strategy", "host", "reason", "codec", "version", "resumed_from"):
            if key in changed:
                changed[key] = text
        if "knobs" in changed:
            changed["knobs"] = {text: text}
        if "metrics" in changed:
            changed["metrics"] = {f"val_{text}": 0.5, "val_loss": 1.0}
        yield changed
    yield {
        "kind": "worker_failed",
        "time": 1.0,
        "worker": 0,
        "attempt": 0,
        "host": text,
        "error": text,
        "traceback": text,
    }
    yield {"kind": "setting_changed", "time": 1.0, "why": text}
    yield {"kind": "tried", "time": 1.0, "steps": 1, "joint": 1.0, "hurts": text}
    yield {"kind": "checkpoint_saved", "time": 1.0, "name": text, "steps": 1, "size_bytes": 1}
    yield {"kind": "round_stalled", "time": 1.0, "worker": text, "waited_for": [text]}
    yield {"kind": text, "time": 1.0}


@pytest.mark.parametrize("payload", [PAYLOADS[0], *(pytest.param(p, marks=pytest.mark.long) for p in PAYLOADS[1:])])
def test_what_a_log_says_is_shown_as_text_and_never_run(page: Any, tmp_path: Path, payload: str) -> None:
    folder = write(tmp_path / f"run {payload}".replace("/", "∕"), hostile(payload))
    other = write(tmp_path / "b", hostile(payload))
    server = serve([str(folder), str(other)])
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(server.url)
        page.wait_for_selector("#state[data-state=ended]")
        until(page, "document.querySelectorAll('#marks li').length > 4")
        assert payload in page.locator("#rows tr").first.inner_text(), "hosts are shown as they are"
        assert payload in page.locator("#marks").inner_text()
        page.get_by_role("button", name="Compare").click()
        until(page, "document.querySelectorAll('#compared tr').length === 2")
        page.wait_for_timeout(300)
        assert page.title() != "owned"
        inside = (
            "[...document.querySelectorAll('main *, header *')].filter(e => ['SCRIPT', 'IFRAME'].includes(e.tagName)"
        )
        assert page.evaluate(f"{inside} || (e.tagName === 'IMG' && e.getAttribute('src') !== 'icon.svg')).length") == 0
        assert all(url.startswith(f"http://localhost:{server.server_address[1]}/") for url in asked)
    finally:
        server.close()


def test_a_log_cannot_write_lines_of_its_own_into_what_prometheus_reads(tmp_path: Path) -> None:
    lie = 'x"} 1\nthinwire_run_active{run="forged"} 1\n'
    server = serve([str(write(tmp_path / "a", hostile(lie)))])
    try:
        poll(lambda: b"thinwire_metric{" in ask(server, "/metrics")[2])
        for line in ask(server, "/metrics")[2].decode().splitlines():
            assert re.fullmatch(r'# .*|\w+\{(\w+="([^"\\]|\\.)*",?)*\} \S+', line), line
            assert not line.startswith('thinwire_run_active{run="forged"')
    finally:
        server.close()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"kind": ' * 50_000,
        b'{"kind": "progressed", "time": ' + b"9" * 5000 + b"}",
        b'{"kind": "worker_joined", "time": 1e999, "worker": 1e999}',
        b'{"kind": "_begin", "time": 1}',
        b"\xff\xfe" * 1000,
        b"x" * (17 << 20),
    ],
    ids=["deep", "deeper", "a long number", "infinity", "a method's name", "no text", "17 MiB"],
)
def test_a_line_that_is_no_event_is_passed_over(tmp_path: Path, line: bytes) -> None:
    folder = write(tmp_path / "a", events(2, 10))
    kept = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(kept[: len(kept) // 2] + b"\n" + line + b"\n" + kept[len(kept) // 2 :])
    server = serve([str(folder)])
    try:
        poll(lambda: server.sources[0].reducer.head.get("state") == "ended")
        assert server.sources[0].error == ""
        assert ask(server, "/metrics")[0] == 200
    finally:
        server.close()


TRIES = """<script>
window.seen = {};
const at = "AT";
const done = (name) => (told) => { window.seen[name] = typeof told === "string" ? told : null; };
const read = (name, options) => fetch(at + "/metrics", options).then((r) => r.text()).then(done(name), done(name));
read("fetch", {});
read("opaque", { mode: "no-cors" });
const news = new EventSource(at + "/stream");
news.onmessage = (event) => done("stream")(event.data);
news.onerror = () => { news.close(); done("stream")(window.seen.stream); };
const script = document.createElement("script");
script.onload = () => done("script")("ran");
script.onerror = done("script");
script.src = at + "/page.js";
document.head.append(script);
const image = new Image();
image.onload = () => done("image")("drawn");
image.onerror = done("image");
image.src = at + "/icon.svg";
addEventListener("load", () => {
  const frame = document.createElement("iframe");
  frame.onload = () => { try { done("frame")(frame.contentDocument.title || null); } catch { done("frame")(null); } };
  frame.src = at + "/";
  document.body.append(frame);
});
</script><body></body>"""


def test_another_site_in_a_real_browser_learns_nothing(chromium: Any, server: PageServer) -> None:
    """Its page tries what pages can: to fetch, to listen, to load as a script, as a picture, in a frame."""
    tries = TRIES.replace("AT", f"http://localhost:{server.server_address[1]}")

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(tries.encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    context = chromium.new_context()
    try:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{other.server_address[1]}/")
        until(page, "Object.keys(window.seen).length === 6")
        seen = page.evaluate("window.seen")
        assert {name: told for name, told in seen.items() if told} == {}
    finally:
        context.close()
        other.shutdown()
        other.server_close()
