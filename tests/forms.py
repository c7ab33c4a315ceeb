"""Whether a header has the form of one of some kinds of message."""

from __future__ import annotations

from typing import Any

from thinwire.errors import ProtocolError
from thinwire.protocol.forms import Kinds


def has_form(kinds: Kinds, header: dict[str, Any]) -> bool:
    """Whether the receiver of these kinds can act on it."""
    try:
        kinds.decode(header)
    except ProtocolError:
        return False
    return True
