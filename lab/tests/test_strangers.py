"""The strangers of `thinwire bench strangers` do what they are there for, and go when they are told to."""

from __future__ import annotations

import os
import time

from thinwire.transport.zmq import Keys, ZmqHub
from thinwire_lab.bench.strangers import KINDS, Mob, _ports_of


def test_strangers_come_to_the_port_of_a_process_are_shown_out_and_leave() -> None:
    hub = ZmqHub(keys=Keys.make(), host="127.0.0.1")
    try:
        port = int(hub.address.rpartition(":")[2])
        assert port in _ports_of(os.getpid()), "other tests of this process may have left ports open"
        mob = Mob(port, longest=1 << 10, count=2 * len(KINDS))
        while hub.refused < 4:  # those with a frame: the others have until the end of a handshake's time
            assert hub.receive(0.05) == []
            time.sleep(0.01)
        told = mob.leave()
        assert told["connected"] >= told["shown out"] >= 3
        assert told["connected_most"] <= 2 * len(KINDS)
        assert told["bytes"] > 0
    finally:
        hub.close()
