"""A page that shows runs, live or afterwards."""

from __future__ import annotations

import secrets
from typing import Any

from thinwire.dashboard.follow import Follower
from thinwire.dashboard.server import LOOPBACK, PageServer, Source, as_dict
from thinwire.dashboard.story import Story

__all__ = ["Dashboard", "Story", "serve"]


class Dashboard:
    """A live page of the run that it is a callback of: `fit(…, callbacks=[Dashboard()])`.

    Args:
        host: where to listen; only this machine unless said. Elsewhere the address has a token in it.
        port: 0 takes a free one; `url` tells.
        title: of the page.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, title: str = "this run") -> None:
        self._source = Source(title)
        self._server = PageServer([self._source], host, port, "" if host in LOOPBACK else secrets.token_urlsafe(16))
        self._server.start()

    @property
    def url(self) -> str:
        return self._server.url

    def __call__(self, event: Any) -> None:
        with self._source.lock:
            self._source.story.feed(as_dict(event))

    def close(self) -> None:
        """Ends the page; browsers keep what they have shown."""
        self._server.close()


def serve(folders: list[str], host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> PageServer:
    """A page on the runs in these out folders; those that still go on are followed."""
    if token is None:
        token = "" if host in LOOPBACK else secrets.token_urlsafe(16)
    sources = [Source(folder.rstrip("/"), Follower(folder).new) for folder in folders]
    return PageServer(sources, host, port, token).start()
