"""A worker's exchange thread. Stepping goes on beside it.

The main thread hands in snapshots and takes out signals, both through queues; `thinwire.exchange.member` is what turns.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import Member
from thinwire.exchange.notes import Note
from thinwire.exchange.ports import Tree
from thinwire.exchange.reports import BEAT_S
from thinwire.exchange.round import Launch
from thinwire.exchange.signals import Broken, Signal
from thinwire.parameters import Fragment
from thinwire.transport.ports import Link

__all__ = ["Peer", "Identity", "TreeCodec"]

LINGER_S = 120.0
"""As long as a step may take."""


class Peer:
    """One worker's exchange, for its stepping thread: it offers the ports of `thinwire.exchange.ports`.

    Most of what it offers are methods of the parts of its `Member`. Those that belong to the exchange thread are posted
    to it. The settings are those of `thinwire.exchange.member.Member`.
    """

    def __init__(self, link: Link, seat: Identity, joint: JointState, *, trees: TreeCodec, **settings: Any) -> None:
        self.member = member = Member(link, seat, joint, trees=trees, **settings)
        self.time = member.station.time
        self.started = False
        self._link = link
        self._stopping = threading.Event()
        context = contextvars.copy_context()  # what is logged there is logged as this worker's
        self._thread = self.time.beside(lambda: context.run(self._run), f"exchange-{seat.worker}")
        training, reports, posting = member.training, member.reports, member.commands.posting
        self.tuples = training.feeding.tuples
        self.claim = training.launching.claim
        self.launch = posting(training.launching.launch)
        self.follow = posting(training.launching.follow)
        self.feed = posting(training.feeding.feed)
        self.withhold = posting(training.feeding.withhold)
        self.abandon = posting(training.feeding.abandon)
        self.put = posting(training.viewing.open)
        self.view = posting(training.viewing.view)
        self.announce = posting(training.viewing.announce)
        self.estrange = posting(member.standing.estrange)
        self.expects = member.transfer.expects
        self.encode = trees.encode
        self.residuals = member.residuals.tree
        self.restore_residuals = member.residuals.load
        self.progress = reports.progress
        self.sent_aside = reports.sent_aside
        self.report = posting(reports.report)
        self.traffic = link.traffic

    def start(self, digest: str) -> None:
        """Joins the run; `digest` tells whether this replica starts equal to the others."""
        self.member.standing.digest = digest
        self.started = True
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        return self.member.reports.counted.bytes_sent

    @property
    def next_round(self) -> int:
        return self.member.training.launching.next_round

    @property
    def follows_until(self) -> float:
        return self.member.training.launching.follows_until

    @property
    def quiet(self) -> bool:
        return self.member.signals.empty()

    def signals(self, timeout_s: float = 0.0) -> Iterator[Signal]:
        """Signals that have come, after waiting at most `timeout_s` for the first.

        They come one by one: a caller that waits for something while it takes up a signal gets the next.
        """
        try:
            if timeout_s > 0:
                yield self.member.signals.get(timeout=timeout_s)
            while True:
                yield self.member.signals.get_nowait()
        except queue.Empty:
            return

    def average(self, key: str, values: Tensor, weight: float, note: Note) -> None:
        """Asks for a one-off float32 mean over all workers, under a key that all of them use."""
        launch = Launch(key, Fragment(0, values.numel()), "float32", values, weight, note)
        self.member.commands.post(lambda: self.member.station.launch(launch))

    def donate(self, peer: int, tree: Tree, generation: int) -> None:
        """Sends the joint state to a peer that asked for it in a generation, unless that is over."""
        data = self.encode(tree)
        self.member.commands.post(lambda: self.member.transfer.give(peer, data, generation))

    def flush(self) -> None:
        """Sends a heartbeat with the newest progress now, ahead of what is reported next."""
        self.member.commands.post(lambda: self.member.beat(sure=True))

    def close(self, timeout_s: float = 10.0) -> None:
        """Sends what is queued and ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.member.join()
            while not self._stopping.is_set():
                self.member.turn()
            self.member.finish()
        except Exception as error:
            self.member.signals.put(Broken(error))
            self._linger()
        finally:
            self.member.close()
            self._link.close()

    def _linger(self) -> None:
        """Something broke here: the main thread, which may be in a long step, raises it and has yet to report it."""
        until, beaten = self.time.now() + LINGER_S, 0.0
        while (now := self.time.now()) < until:
            ending = self._stopping.is_set()
            with contextlib.suppress(Exception):
                self.member.commands.obey()
            if ending:
                return
            if now - beaten >= BEAT_S:
                beaten = now
                self.member.beat()
            self._link.receive(BEAT_S)
