"""A worker's exchange thread. Stepping goes on beside it.

The main thread hands in snapshots and takes out signals, both through queues; `thinwire.exchange.member` is what turns.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.member import BEAT_S, Member
from thinwire.exchange.mesh import Mesh
from thinwire.exchange.ports import Exchange
from thinwire.exchange.rounds import Launch
from thinwire.exchange.signals import Broken, Signal
from thinwire.exchange.snapshot import Snapshot
from thinwire.parameters import Fragment
from thinwire.protocol.forms import Body, header_of
from thinwire.protocol.messages import COORDINATOR
from thinwire.transport.ports import Link, Traffic

__all__ = ["Peer", "Identity", "TreeCodec"]

LINGER_S = 120.0
"""As long as a step may take."""


class Peer(Exchange):
    """One worker's exchange, for its stepping thread: see `thinwire.exchange.ports`.

    `kind` says how training's traffic moves; the other settings are those of `thinwire.exchange.member.Member`.
    """

    def __init__(
        self,
        link: Link,
        seat: Identity,
        joint: JointState,
        *,
        trees: TreeCodec,
        kind: type[Member] = Mesh,
        **settings: Any,
    ) -> None:
        self._link, self._trees = link, trees
        self.member = kind(link, seat, joint, trees=trees, **settings)
        self.time = self.member.time
        self.started = False
        self._stopping = threading.Event()
        context = contextvars.copy_context()  # what is logged there is logged as this worker's
        self._thread = self.time.beside(lambda: context.run(self._run), f"exchange-{seat.worker}")

    def start(self, digest: str) -> None:
        """Joins the run; `digest` tells whether this replica starts equal to the others."""
        self.member.digest = digest
        self.started = True
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        return self.member.bytes_sent

    def traffic(self) -> Traffic | None:
        """What sockets have counted so far; see `thinwire.transport.ports.Link`."""
        return self._link.traffic()

    @property
    def quiet(self) -> bool:
        """Whether no signal waits; cheap enough for every step."""
        return self.member.signals.empty()

    def signals(self, timeout_s: float = 0.0) -> Iterator[Signal]:
        """Signals that have come, after waiting at most so long for the first.

        One by one: whoever waits for something while it takes one up gets the next, and none is held back meanwhile.
        """
        try:
            if timeout_s > 0:
                yield self.member.signals.get(timeout=timeout_s)
            while True:
                yield self.member.signals.get_nowait()
        except queue.Empty:
            return

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round this worker is to launch next."""
        return self.member.claim()

    @property
    def next_round(self) -> int:
        return self.member.next_round

    def launch(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        """Contributes to a claimed round: a snapshot to be taken, a tensor that no longer changes, or nothing."""
        self.member.command(lambda: self.member.contribute(round, fragment, snapshot, weight, note))

    @property
    def tuples(self) -> Sequence[Fragment]:
        """The pieces in which a contribution goes to servers."""
        return self.member.tuples

    def feed(self, round: int, keys: list[int], absent: frozenset[int] = frozenset()) -> None:
        """Tuples of a launched round whose values no longer change, and parameters that have no gradient in any."""
        self.member.command(lambda: self.member.feed(round, keys, absent))

    def withhold(self, round: int) -> None:
        """What a launched round has yet to be fed counts for nothing."""
        self.member.command(lambda: self.member.withhold(round))

    def average(self, key: str, values: Tensor, weight: float, note: dict[str, Any]) -> None:
        """Asks for a one-off float32 mean over all workers, under a key that all of them use."""
        launch = Launch(key, Fragment(0, values.numel()), "float32", values, weight, note)
        self.member.command(lambda: self.member.launch(launch))

    def put(self, generation: int, model: Tensor | None) -> None:
        """What a generation goes on with, where this worker is its reference: the joint state here, or this model."""
        self.member.command(lambda: self.member.open(generation, model))

    def view(self, key: str) -> None:
        """Asks for the joint model as it is on its servers, under a key; it comes as a mean of one does."""
        self.member.command(lambda: self.member.view(key))

    def announce(self, note: dict[str, Any]) -> None:
        """Tells the first worker how far this one is, or what it wants to publish, outside of a round."""
        self.member.command(lambda: self.member.announce(note))

    def follow(self, until: float, *, in_step: bool = False) -> None:
        """Takes part in rounds before this one without contributing; in step with a group, in no other."""
        self.member.command(lambda: self.member.follow(until, in_step=in_step))

    def abandon(self, round: int) -> None:
        """Gives up a launched round whose values were never made."""
        self.member.command(lambda: self.member.abandon(round))

    @property
    def follows_until(self) -> float:
        """The round before which it takes part in others' rounds; as the exchange thread has it."""
        return self.member.follows_until

    def estrange(self) -> None:
        """What the replica has is not what the joint state says: it has to be handed over anew."""
        self.member.command(self.member.estrange)

    def donate(self, peer: int, tree: dict[str, Any], generation: int) -> None:
        """Sends the joint state to a peer that asked for it in a generation, unless that is over."""
        data = self.encode(tree)
        self.member.command(lambda: self.member.donation.give(peer, data, generation))

    def expects(self, fits: Callable[[dict[str, Any]], bool]) -> None:
        """Has a joint state that a peer gives looked at before it is taken over; before `start`, for any thread."""
        self.member.fits = fits

    def encode(self, tree: object) -> bytes:
        """A tree as bytes, in the form of checkpoints."""
        return self._trees.encode(tree)

    def report(self, body: Body, payload: memoryview | None = None) -> None:
        """Tells the coordinator something."""
        self.member.command(lambda: self._link.send(COORDINATOR, header_of(body), payload))

    def sent_aside(self, size_bytes: int) -> None:
        """What this worker has sent beside the exchange, in all."""
        self.member.aside_bytes = size_bytes

    def progress(self, values: dict[str, Any]) -> None:
        """What the next heartbeat says."""
        self.member.progress = values

    def flush(self) -> None:
        """Sends a heartbeat with the newest progress now, ahead of what is reported next."""
        self.member.command(lambda: self.member.beat(sure=True))

    def residuals(self) -> list[Tensor] | None:
        """What compression has left unsent, for a checkpoint; only while no round is open."""
        return self.member.residuals.tree()

    def restore_residuals(self, values: list[Tensor] | None) -> None:
        """Puts back what a checkpoint holds; before `start`."""
        self.member.residuals.load(values)

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
                self.member.obey()
            if ending:
                return
            if now - beaten >= BEAT_S:
                beaten = now
                self.member.beat()
            self._link.receive(BEAT_S)
