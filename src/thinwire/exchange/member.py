"""One worker's part in a run, as a machine that an exchange thread turns.

It takes in messages and hands each to the part that it is for: `Rounds`, `Generations`, `StateTransfer`, `Means`,
`Reports`, and the training's own traffic.
"""

from __future__ import annotations

import logging

from thinwire.errors import ThinwireError
from thinwire.exchange.carrier import AMONG_MEMBERS, Carrier, Ends
from thinwire.exchange.commands import Commands
from thinwire.exchange.generations import Generations
from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.means import Means
from thinwire.exchange.mesh import on_mesh
from thinwire.exchange.reports import Reports
from thinwire.exchange.residuals import Residuals, resends
from thinwire.exchange.rounds import OfRound, Rounds
from thinwire.exchange.signals import Told
from thinwire.exchange.state_transfer import StateTransfer
from thinwire.exchange.station import Standing, Station
from thinwire.exchange.training import Kind
from thinwire.protocol.clock import REAL, Time
from thinwire.protocol.forms import Body
from thinwire.protocol.messages import COORDINATOR, TO_WORKER, Commit, Message, Pong, Prepare, Rejoin, State, Want
from thinwire.rules.compression import codec, warm_up
from thinwire.transport.ports import Link

REFUSED = (ArithmeticError, AttributeError, LookupError, RuntimeError, ThinwireError, TypeError, ValueError)
"""What taking in a peer's message may raise when it does not fit."""
MOST_LOGGED, TICK_S = 8, 0.05
"""TICK_S is how often a round is looked at that may have to end without all; else only messages wake this thread."""

LONGER = 1 << 24
"""Elements by which a mean of buffers may be longer than the model."""

_log = logging.getLogger("thinwire.exchange")


class Member:
    """The machine. Its parts say which of their methods are safe on any thread; the rest belongs to one thread."""

    def __init__(
        self,
        link: Link,
        seat: Identity,
        joint: JointState,
        *,
        codec_name: str,
        trees: TreeCodec,
        kind: Kind = on_mesh,
        carrier: Carrier = AMONG_MEMBERS,
        fresh: bool = True,
        silence_s: float = 30.0,
        stop_on_nonfinite: bool = False,
        time: Time = REAL,
    ) -> None:
        self._link, self._joint, self._codec_name, self._carrier = link, joint, codec_name, carrier
        self._worker = seat.worker
        self.signals = time.queue()
        """What the main thread is to hear, in order."""
        self.commands = Commands(link.wake)
        self.reports = Reports(
            link, seat, signals=self.signals, time=time, silence_s=silence_s, stop_on_nonfinite=stop_on_nonfinite
        )
        self.residuals = Residuals(joint.size, resend=resends(joint.strategy))
        ends = Ends(
            worker=seat.worker,
            strategy=joint.strategy,
            link=link,
            send=self.reports.counted.send,
            clock=time.now,
            tell_not_finite=self.reports.tell_not_finite,
        )
        self.rounds = Rounds(
            seat.worker,
            carrier.summing(ends),
            self.residuals.lane,
            longest=joint.size + LONGER,
            clock=time.now,
            buffers=joint.strategy.in_flight,
        )
        self.standing = Standing(fresh=fresh)
        self.station = Station(
            identity=seat,
            joint=joint,
            codec_name=codec_name,
            trees=trees,
            time=time,
            rounds=self.rounds,
            signals=self.signals,
            standing=self.standing,
            send=ends.send,
            command=self.commands.post,
            obey=self.commands.obey,
            wake=link.wake,
            note=self.reports.note,
            tell_not_finite=ends.tell_not_finite,
        )
        self.training = kind(self.station, Means(self.station))
        self.transfer = StateTransfer(self.station, self.training.forming)
        self._generations = Generations(self.station, self.training.forming, self.transfer, self.residuals, link)

    def join(self) -> None:
        """Asks for a seat, once the codec's loops are loaded: later they would take the processor from training."""
        warm_up(codec(self._joint.cuts.newest.setting.codec or self._codec_name))
        self.reports.join()

    def finish(self) -> None:
        """Does what was still asked for, and says a last word."""
        self.commands.obey()
        self.beat()

    def close(self) -> None:
        """Lets go of what it holds beside the link."""
        self.training.turning.close()

    def beat(self, *, sure: bool = False) -> None:
        """Says how far this worker is; surely, where no later beat would make up for a lost one."""
        waiting = self.training.turning.waiting_for()
        self.reports.beat(self._joint.landed, waiting, self.rounds.refused, sure=sure)

    def turn(self) -> None:
        """One round of messages, commands, rounds and beats."""
        patience_s = TICK_S if self.rounds.waiting else max(TICK_S, self.reports.until_beat_s)
        for message in self.reports.counted.receive(patience_s):
            if message.sender == COORDINATOR:
                self.reports.heard()
                self._from_coordinator(TO_WORKER.decode(message.header))
            else:
                try:
                    self._from_peer(message)
                except REFUSED as error:
                    self._refuse(message.sender, error)
        self.commands.obey()
        now = self.station.time.now()
        if not self.standing.frozen:
            self.training.turning.work()
            self.transfer.tick()
        if self.reports.is_due(now):
            self.beat()
        self.reports.check_silence(now)

    def _from_coordinator(self, body: Body) -> None:
        if isinstance(body, Prepare):
            self._generations.prepare(body)
        elif isinstance(body, Commit):
            self._generations.commit(body)
        elif isinstance(body, Rejoin):  # its seat was given up while it could not be heard, and no other has taken it
            if self.reports.may_rejoin():
                self.standing.frozen = True
                self.join()
        elif not isinstance(body, Pong):
            self.signals.put(Told(body))

    def _from_peer(self, message: Message) -> None:
        body, sender = self._carrier.decode(message), message.sender
        if isinstance(body, Want):
            self.transfer.asked(sender, body.generation)
        elif isinstance(body, State):
            self.transfer.take(sender, body, message.payload)
        elif not isinstance(body, OfRound):
            self.training.turning.receive(sender, body, message.payload)
        elif not (self.standing.frozen and body.generation == self.rounds.generation):
            self.rounds.receive(sender, body, message.payload)

    def _refuse(self, sender: int, error: Exception) -> None:
        self.rounds.refused += 1
        if self.rounds.refused <= MOST_LOGGED:
            _log.warning("worker %s refused a message of worker %s: %s", self._worker, sender, error)
