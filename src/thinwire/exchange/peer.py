"""A worker's exchange thread. Stepping goes on beside it.

The main thread hands in snapshots and takes out signals, both through queues; `thinwire.exchange.mesh` is what turns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from thinwire.engine.joint import JointState
from thinwire.engine.ports import COORDINATOR, Header, Link
from thinwire.engine.signals import Broken, Signal
from thinwire.engine.snapshot import Snapshot
from thinwire.exchange.mesh import Mesh
from thinwire.exchange.rounds import Launch
from thinwire.exchange.seat import Seat, Trees
from thinwire.parameters import Fragment

__all__ = ["MeshPeer", "Seat", "Trees"]


class MeshPeer:
    """The exchange port of one worker; every public method is for the main thread."""

    def __init__(
        self,
        link: Link,
        seat: Seat,
        joint: JointState,
        *,
        codec_name: str,
        trees: Trees,
        fresh: bool = True,
        silence_s: float = 30.0,
    ) -> None:
        self._link, self._trees = link, trees
        self.mesh = Mesh(link, seat, joint, codec_name=codec_name, trees=trees, fresh=fresh, silence_s=silence_s)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"exchange-{seat.worker}", daemon=True)

    def start(self, digest: str) -> None:
        """Joins the run; `digest` tells whether this replica starts equal to the others."""
        self.mesh.digest = digest
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def bytes_sent(self) -> int:
        return self.mesh.bytes_sent

    @property
    def quiet(self) -> bool:
        """Whether no signal waits; cheap enough for every step."""
        return self.mesh.signals.empty()

    def signals(self, timeout_s: float = 0.0) -> Iterator[Signal]:
        """Signals that have come, after waiting at most so long for the first.

        One by one: whoever waits for something while it takes one up gets the next, and none is held back meanwhile.
        """
        try:
            if timeout_s > 0:
                yield self.mesh.signals.get(timeout=timeout_s)
            while True:
                yield self.mesh.signals.get_nowait()
        except queue.Empty:
            return

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round this worker is to launch next."""
        return self.mesh.claim()

    @property
    def next_round(self) -> int:
        return self.mesh.next_round

    def launch(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        """Contributes to a claimed round: a snapshot to be taken, a tensor that no longer changes, or nothing."""
        self.mesh.command(lambda: self.mesh.contribute(round, fragment, snapshot, weight, note))

    def average(self, key: str, values: Tensor, weight: float, note: dict[str, Any]) -> None:
        """Asks for a one-off float32 mean over all workers, under a key that all of them use."""
        launch = Launch(key, Fragment(0, values.numel()), "float32", values, weight, note)
        self.mesh.command(lambda: self.mesh.launch(launch))

    def follow(self, following: bool) -> None:
        """Takes part in rounds without contributing, from now on or no longer."""

        def act() -> None:
            self.mesh.following = following

        self.mesh.command(act)

    def donate(self, peer: int, tree: dict[str, Any]) -> None:
        """Sends the joint state to a peer that asked."""
        data = self.encode(tree)
        self.mesh.command(lambda: self.mesh.hand_over(peer, data))

    def encode(self, tree: object) -> bytes:
        """A tree as bytes, in the form of checkpoints."""
        return self._trees.encode(tree)

    def report(self, header: Header, payload: memoryview | None = None) -> None:
        """Tells the coordinator something."""
        self.mesh.command(lambda: self._link.send(COORDINATOR, header, payload))

    def progress(self, values: dict[str, Any]) -> None:
        """What the next heartbeat says."""
        self.mesh.progress = values

    def flush(self) -> None:
        """Sends a heartbeat with the newest progress now, ahead of what is reported next."""
        self.mesh.command(self.mesh.beat)

    def residuals(self) -> list[Tensor] | None:
        """What compression has left unsent, for a checkpoint; only while no round is open."""
        return self.mesh.residuals.tree()

    def restore_residuals(self, values: list[Tensor] | None) -> None:
        """Puts back what a checkpoint holds; before `start`."""
        self.mesh.residuals.load(values)

    def close(self, timeout_s: float = 10.0) -> None:
        """Sends what is queued and ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.mesh.join()
            while not self._stopping.is_set():
                self.mesh.turn()
            self.mesh.finish()
        except Exception as error:  # the main thread raises it
            self.mesh.signals.put(Broken(error))
        finally:
            self._link.close()
