"""What members of a group send each other is authenticated and encrypted with the run's keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from thinwire.cluster.base import sockets
from thinwire.exchange.signals import GroupBrokenError
from thinwire.placement import Crew, between_processes

PATIENCE_S = 60.0


@pytest.fixture
def wire() -> Iterator[Any]:
    hub, found = sockets("127.0.0.1", "127.0.0.1")
    yield found
    hub.close()


def together(crews: list[Crew], task: Callable[[Crew], Any]) -> list[Any]:
    """What each member returns, or the error that it raises; each acts in a thread of its own."""
    found: list[Any] = [None] * len(crews)

    def act(part: int) -> None:
        try:
            found[part] = task(crews[part])
        except Exception as error:
            found[part] = error

    threads = [threading.Thread(target=act, args=(part,)) for part in range(len(crews))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def crews_of(wire: Any, size: int) -> list[Crew]:
    return [between_processes(part, 0, size, "127.0.0.1", wire=wire) for part in range(size)]


def form(crews: list[Crew], name: str, patience_s: float = PATIENCE_S) -> list[Any]:
    address = crews[0].address
    return together(crews, lambda crew: crew.form(address, name, patience_s))


def exchanged(crew: Crew) -> list[torch.Tensor]:
    pieces = [torch.full((3, 1 + to), float(crew.part), dtype=torch.float64) for to in range(crew.size)]
    return crew.hand(pieces, [(3, 1 + crew.part)] * crew.size)


def check(crews: list[Crew]) -> None:
    for part, came in enumerate(together(crews, exchanged)):
        assert [piece.unique().tolist() for piece in came] == [[0.0], [1.0], [2.0]]
        assert all(piece.shape == (3, 1 + part) for piece in came)
    assert together(crews, lambda crew: crew.tell([crew.part, 7.0])) == [[[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]] * 3


def test_members_hand_each_other_tensors_and_meet_again(wire: Any) -> None:
    crews = crews_of(wire, 3)
    assert form(crews, "1") == [None] * 3
    check(crews)
    large = together(crews, lambda crew: crew.hand([torch.ones(9_000_000)] * 3, [(9_000_000,)] * 3))
    assert all(float(piece.sum()) == 9e6 for came in large for piece in came)
    assert form(crews, "2") == [None] * 3
    check(crews)
    together(crews, lambda crew: crew.close())


def test_the_others_notice_a_member_that_leaves(wire: Any) -> None:
    crews = crews_of(wire, 3)
    form(crews, "1")
    found = together(crews, lambda crew: crew.close() if crew.part == 1 else exchanged(crew))
    assert found[1] is None
    assert all(isinstance(found[part], GroupBrokenError) for part in (0, 2))
    for part in (0, 2):
        crews[part].close()


def test_nothing_of_a_tensor_can_be_read_on_the_wire_and_nobody_without_the_keys_is_heard(wire: Any) -> None:
    """A relay in between writes down what passes; a stranger speaks to a member."""
    crews = crews_of(wire, 2)
    heard = bytearray()
    relay = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)
        except OSError:
            return

    def listen() -> None:
        while True:
            try:
                inward, _ = relay.accept()
            except OSError:
                return
            host, _, port = crews[0].address.rpartition(":")
            outward = socket.create_connection((host, int(port)))
            threading.Thread(target=carry, args=(inward, outward), daemon=True).start()
            threading.Thread(target=carry, args=(outward, inward), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    with socket.create_connection(crews[0].address.rpartition(":")[::2]) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        between = f"127.0.0.1:{relay.getsockname()[1]}"
        met = together(crews, lambda crew: crew.form(between if crew.part else crews[0].address, "1", PATIENCE_S))
    assert met == [None, None]
    mark = torch.full((64,), 0x41424344, dtype=torch.int32)
    came = together(crews, lambda crew: crew.hand([mark] * 2, [(64,)] * 2))
    assert all(torch.equal(piece, mark) for pieces in came for piece in pieces)
    assert heard
    assert b"DCBADCBA" not in heard
    assert b"here" not in heard
    relay.close()
    together(crews, lambda crew: crew.close())


def test_keys_of_another_run_meet_nobody(wire: Any) -> None:
    hub, other = sockets("127.0.0.1", "127.0.0.1")
    crews = [between_processes(0, 0, 2, "127.0.0.1", wire=wire), between_processes(1, 0, 2, "127.0.0.1", wire=other)]
    found = form(crews, "1", patience_s=3.0)
    assert all(isinstance(each, GroupBrokenError) for each in found)
    together(crews, lambda crew: crew.close())
    hub.close()
