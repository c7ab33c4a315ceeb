"""What a worker says of itself when it joins, and whether the coordinator understands it."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from thinwire import __version__
from thinwire.errors import ProtocolError

if TYPE_CHECKING:
    from thinwire.protocol.messages import Header

PROTOCOL = 4
"""Of all messages of a run. It grows with every change that an older thinwire would misunderstand, and only here."""

_log = logging.getLogger("thinwire.coordinator")


def hello() -> dict[str, Any]:
    """Who and where a worker is, and which thinwire it runs."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "thinwire": __version__, "protocol": PROTOCOL}


def check_hello(worker: int, header: Header) -> None:
    """Nothing, where both speak one protocol.

    Raises:
        ProtocolError: The worker runs a thinwire that this one cannot train with.
    """
    theirs, version = header.get("protocol"), str(header.get("thinwire", "of an unknown version"))
    who = f"worker {worker} on {header.get('host', 'an unknown host')} (pid {header.get('pid', '?')})"
    if theirs != PROTOCOL:
        spoken = "none that it names" if theirs is None else theirs
        raise ProtocolError(
            f"{who} runs thinwire {version}, whose protocol is {spoken}; the driver runs thinwire {__version__}, whose "
            f"protocol is {PROTOCOL}. All must speak the same one. Install thinwire {__version__} there, or the "
            "worker's version here."
        )
    if version != __version__:
        _log.warning("%s runs thinwire %s and the driver %s; they understand each other", who, version, __version__)
