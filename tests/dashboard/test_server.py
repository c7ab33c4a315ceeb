"""The page's server: who may read it, what it tells, how it ends."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import thinwire as tw
from thinwire import events as happened
from thinwire.dashboard import Dashboard, serve
from thinwire.dashboard.server import MOST_STREAMS, PageServer
from thinwire.errors import ConfigError

from .logs import events, write

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    found = serve([str(write(tmp_path / name, events(2, 20, lost=1))) for name in ("a", "b")])
    yield found
    found.close()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=600)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def stream(server: PageServer, path: str = "/stream") -> tuple[http.client.HTTPConnection, Iterator[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=600)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")

    def messages() -> Iterator[dict[str, Any]]:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    return connection, messages()


def test_the_page_and_its_parts_are_there(server: PageServer) -> None:
    kinds = {"/": "html", "/page.js": "javascript", "/charts.js": "javascript", "/page.css": "css"}
    for path, kind in kinds.items():
        status, headers, body = get(server, path)
        assert status == 200
        assert headers["Content-Type"].startswith(f"text/{kind};")
        assert len(body) > 300
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
    for path in ("/nothing", "/../server.py", "/assets/index.html", "/%2e%2e/server.py"):
        assert get(server, path)[0] == 404
    page = get(server, "/")[2].decode()
    assert "http://" not in page
    assert "https://" not in page


def test_the_stream_tells_every_run_and_one_in_detail(server: PageServer) -> None:
    connection, messages = stream(server, "/stream?run=1")
    told: dict[int, dict[str, Any]] = {}
    while set(told) != {0, 1} or any(m["head"]["state"] != "ended" for m in told.values()):
        message = next(messages)
        told.setdefault(message["run"], {}).update(message)
    connection.close()
    assert told[0]["title"].endswith("/a")
    assert "workers" not in told[0]
    assert [row["worker"] for row in told[1]["workers"]] == [0, 1]
    assert told[1]["workers"][1]["lost"] == 1


def test_counters_for_prometheus(server: PageServer) -> None:
    connection, messages = stream(server)
    while next(messages).get("head", {}).get("state") != "ended":
        pass
    connection.close()
    status, headers, body = get(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert body.count(b"thinwire_workers_lost_total{") == 2
    assert b'/a"} 1\n' in body


def test_another_site_that_points_here_is_refused(server: PageServer) -> None:
    assert get(server, "/", Host="evil.example:80")[0] == 403
    assert get(server, "/stream", Host="evil.example")[0] == 403
    assert get(server, "/", Host="localhost:99")[0] == 200


def test_wider_than_this_machine_a_token_is_needed(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "a", events(2, 5)))
    with pytest.raises(ConfigError, match="give it a token"):
        serve([folder], "0.0.0.0", 0, token="")
    server = serve([folder], "0.0.0.0")
    try:
        assert "?token=" in server.url
        assert get(server, "/")[0] == 403
        assert get(server, "/stream")[0] == 403
        assert get(server, "/metrics?token=wrong")[0] == 403
        assert get(server, f"/?token={server.token}")[0] == 200
        assert get(server, f"/metrics?token={server.token}", Host="any")[0] == 200
        assert get(server, "/page.js")[0] == 200
        assert len(server.token) >= 20
        assert get(server, "/metrics", Authorization=f"Bearer {server.token}")[0] == 200
        assert get(server, "/metrics", Authorization="Bearer wrong")[0] == 403
    finally:
        server.close()


def test_a_token_of_ones_own_stays_and_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_DASHBOARD_TOKEN", "a-secret-of-mine")
    server = serve([str(write(tmp_path / "a", events(1, 2)))], "0.0.0.0")
    try:
        assert "a-secret-of-mine" not in server.url
        assert get(server, "/?token=a-secret-of-mine")[0] == 200
    finally:
        server.close()


def test_ipv6(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "a", events(1, 2)))
    try:
        server = serve([folder], "::1")
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with socket.create_connection(("::1", server.server_address[1]), timeout=600):
        pass
    server.close()


def test_an_address_that_nobody_can_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"foo://x.* cannot be read"):
        serve(["foo://x"])


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "a", events(1, 2)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*give another port"):
            serve([folder], "127.0.0.1", port)


def test_streams_are_limited_and_given_back(server: PageServer) -> None:
    opened = [stream(server) for _ in range(MOST_STREAMS)]
    assert get(server, "/stream")[0] == 503
    for connection, _ in opened:
        connection.close()
    opened.clear()
    deadline = time.monotonic() + 600
    while get_status(server) != 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def get_status(server: PageServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=600)
    try:
        connection.request("GET", "/stream")
        return connection.getresponse().status
    finally:
        connection.close()


def test_what_is_no_number_and_what_is_no_plain_value_reaches_the_page_all_the_same() -> None:
    page = Dashboard()
    try:
        knobs = {"optimizer": print, "lr": float("inf")}
        page(happened.RunStarted(strategy="x", knobs=knobs, workers=1, rows=1, validation_rows=0, seed=0))
        metrics = {"val_loss": float("nan")}
        page(happened.Evaluated(number=1, epoch=1, steps=1, rows=1, metrics=metrics, validation_rows=1, best=True))
        connection, messages = stream(page._server)
        told = next(messages)
        connection.close()
        assert told["head"]["metrics"] == {"val_loss": None}
        assert told["head"]["knobs"] == {"optimizer": str(print), "lr": None}
        assert told["series"]["m:val_loss"]["p"][0][2] is None
    finally:
        page.close()


def test_the_page_is_told_for_how_long_there_was_no_news(server: PageServer) -> None:
    connection, messages = stream(server)
    quiet = next(message for message in messages if "quiet_s" in message)
    connection.close()
    assert quiet["error"] == ""
    assert quiet["quiet_s"] >= 0


def test_a_live_run_is_on_the_page_to_its_last_event() -> None:
    page = Dashboard(title="mine")
    try:
        tw.fit(
            "mlp", "digits", epochs=1, validation=0.2, callbacks=[page], cluster=tw.Simulated(workers=2, step_s=0.01)
        )
        port = urlsplit(page.url).port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("GET", "/stream")
        answer = connection.getresponse()
        line = next(line for line in answer if line.startswith(b"data: "))
        told = json.loads(line[6:])
        assert told["title"] == "mine"
        assert told["head"]["state"] == "ended"
        assert len(told["workers"]) == 2
        connection.close()
    finally:
        page.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_who_reads_hears_the_end_before_the_server_goes() -> None:
    page = Dashboard()
    connection, messages = stream(page._server)
    page(happened.RunStarted(strategy="relay", knobs={}, workers=1, rows=1, validation_rows=0, seed=0))
    page(happened.RunEnded(reason="done", summary={}))
    page.close()
    assert [m["head"]["state"] for m in messages if "head" in m][-1] == "ended"
    connection.close()
