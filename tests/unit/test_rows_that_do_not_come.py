"""A worker that asks the driver for its rows: a silent driver is told from one that does not send them."""

from __future__ import annotations

import itertools
import time

import pytest

from thinwire.errors import TimedOutError
from thinwire.exchange.signals import CutOffError
from thinwire.protocol.forms import header_of
from thinwire.protocol.messages import Piece
from thinwire.run.job import _fetch
from thinwire.transport.memory import MemoryHub, Room


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Ten seconds pass with each look at the clock."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    return Room()


def test_a_worker_whom_the_driver_never_answers_ends_as_cut_off(room: Room) -> None:
    """Spark starts such a worker again; it ended as one whose work is done, and its run waited for `start_s`."""
    MemoryHub(room)
    with pytest.raises(CutOffError, match="heard nothing from the driver for 60 s"):
        list(_fetch(room.link(0, 0), 0, 60.0, "train.arrow"))


def test_a_driver_that_is_heard_and_sends_another_piece_is_named(room: Room) -> None:
    hub = MemoryHub(room)
    link = room.link(0, 0)
    hub.send(0, 0, header_of(Piece(name="another", index=0, count=1)), memoryview(b"rows"))
    with pytest.raises(TimedOutError, match=r"did not send piece 0 of 'train\.arrow' within 60 s"):
        list(_fetch(link, 0, 60.0, "train.arrow"))
