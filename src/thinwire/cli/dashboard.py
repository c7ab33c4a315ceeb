"""`thinwire dashboard`, and the live page of `thinwire train --dashboard`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from thinwire.dashboard import Dashboard, serve
from thinwire.errors import ConfigError


def dashboard(options: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C."""
    host, port = _address(options.listen)
    server = serve(options.folders, host, port)
    print(f"thinwire: {server.url} (Ctrl-C ends it)", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0


@contextlib.contextmanager
def watching(where: str | bool | None, title: str) -> Iterator[list[Callable[[Any], Any]]]:
    """Serves a live page during a run, if wanted; yields the callbacks for the run."""
    if not where:
        yield []
        return
    host, port = ("127.0.0.1", 0) if where is True else _address(where)
    page = Dashboard(host, port, title=title)
    print(f"thinwire: dashboard at {page.url}", file=sys.stderr, flush=True)
    try:
        yield [page]
    finally:
        page.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{text!r} is not an address; write HOST:PORT, such as 127.0.0.1:8080, or 0 for any free port"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
