"""What a worker tells of itself when it joins, and whether the coordinator can work with its version."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from thinwire.errors import ProtocolError
from thinwire.version import __version__

if TYPE_CHECKING:
    from thinwire.protocol.messages import Join

PROTOCOL = 4
"""Version of all messages of a run. Increase it with every change that an older thinwire would misunderstand."""

_log = logging.getLogger("thinwire.coordinator")


def hello() -> dict[str, Any]:
    """Host, process and versions of this worker."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "thinwire": __version__, "protocol": PROTOCOL}


def check_hello(worker: int, join: Join) -> None:
    """Checks that worker and driver speak the same version of the protocol.

    Raises:
        ProtocolError: The worker's protocol is another one.
    """
    who = f"worker {worker} on {join.host or 'an unknown host'} (pid {join.pid or '?'})"
    if join.protocol != PROTOCOL:
        spoken = "none that it names" if join.protocol is None else join.protocol
        raise ProtocolError(
            f"{who} runs thinwire {join.thinwire}, whose protocol is {spoken}; the driver runs thinwire {__version__}, "
            f"whose protocol is {PROTOCOL}. All must speak the same one. Install thinwire {__version__} there, or the "
            "worker's version here."
        )
    if join.thinwire != __version__:
        _log.warning(
            "%s runs thinwire %s and the driver %s; they understand each other", who, join.thinwire, __version__
        )
