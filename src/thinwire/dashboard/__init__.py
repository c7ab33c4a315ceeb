"""A page that shows runs, live or afterwards."""

from __future__ import annotations

from typing import Any

from thinwire.dashboard.event_reducer import EventReducer
from thinwire.dashboard.follow import Follower
from thinwire.dashboard.server import PageServer, Source, as_dict, token_for

__all__ = ["Dashboard", "EventReducer", "serve"]


class Dashboard:
    """A live page of the run that it is a callback of: `fit(…, callbacks=[Dashboard()])`.

    Args:
        host: where to listen; only this machine unless said. Elsewhere the address has a token in it.
        port: 0 takes a free one; `url` tells.
        title: of the page.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, title: str = "this run") -> None:
        self._source = Source(title)
        self._server = PageServer([self._source], host, port, token_for(host))
        self._server.start()

    @property
    def url(self) -> str:
        return self._server.url

    def __call__(self, event: Any) -> None:
        self._source.feed([as_dict(event)])

    def close(self) -> None:
        """Ends the page; browsers keep what they have shown."""
        self._server.close()


def serve(folders: list[str], host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> PageServer:
    """A page on the runs in these out folders; those that still go on are followed."""
    sources = [Source(folder.rstrip("/"), Follower(folder).new) for folder in folders]
    return PageServer(sources, host, port, token_for(host) if token is None else token).start()
