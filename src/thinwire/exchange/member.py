"""One worker's part in a run: generations, heartbeats, one-off means, as a machine that an exchange thread turns.

How a generation begins, and why nothing is lost on the way::

    1. coordinator: prepare(g)     every worker stops merging, and answers with its generation and rounds landed
    2. coordinator: commit(g)      members, the reference (of the newest generation, who landed most), its count L
    3. worker with both            goes on with what it had under way, among the new members
       worker behind, or new       asks the reference for the joint state
    4. the state arrives           it is loaded: this worker holds what all hold

How training's own traffic moves is left to a subclass: `Mesh` in rounds of all workers, `Table` by each alone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import DivergedError, ProtocolError, ThinwireError
from thinwire.exchange.carrier import AMONG_MEMBERS, Carrier, Ends
from thinwire.exchange.identity import Identity, TreeCodec
from thinwire.exchange.joint import JointState
from thinwire.exchange.means import Means
from thinwire.exchange.residuals import Residuals
from thinwire.exchange.rounds import Completed, Launch
from thinwire.exchange.signals import Asked, Averaged, Broken, Caught, CutOffError, Formed, Told
from thinwire.exchange.snapshot import Snapshot
from thinwire.exchange.state_transfer import StateTransfer
from thinwire.exchange.station import Standing, Station
from thinwire.parameters import Fragment
from thinwire.protocol.clock import REAL, Time
from thinwire.protocol.forms import Body, header_of
from thinwire.protocol.identifiers import number
from thinwire.protocol.messages import (
    COORDINATOR,
    TO_WORKER,
    Beat,
    Commit,
    Happened,
    Join,
    Message,
    Pong,
    Prepare,
    Prepared,
    Rejoin,
    State,
    Want,
)
from thinwire.protocol.observation import Synchronised
from thinwire.rules.compression import codec, warm_up
from thinwire.transport.ports import Link

REFUSED = (ArithmeticError, AttributeError, LookupError, RuntimeError, ThinwireError, TypeError, ValueError)
"""What taking in a peer's message may raise when it does not fit."""
MOST_LOGGED, MOST_WANTS, BEAT_S, REJOIN_S, TICK_S = 8, 4096, 0.5, 3.0, 0.05
MOST_FLAWS = 256
"""TICK_S is how often a round is looked at that may have to end without all; else only messages wake this thread."""

_log = logging.getLogger("thinwire.exchange")


class Member(ABC):
    """The machine. `command`, `claim` and `next_round` are safe on any thread; the rest belongs to one."""

    tuples: Sequence[Fragment] = ()

    def __init__(
        self,
        link: Link,
        seat: Identity,
        joint: JointState,
        *,
        codec_name: str,
        trees: TreeCodec,
        carrier: Carrier = AMONG_MEMBERS,
        fresh: bool = True,
        silence_s: float = 30.0,
        stop_on_nonfinite: bool = False,
        time: Time = REAL,
    ) -> None:
        self._link, self._identity, self._joint, self._trees, self.time = link, seat, joint, trees, time
        self._codec_name, self._silence_s = codec_name, silence_s
        self._stop_on_nonfinite, self._flaws = stop_on_nonfinite, 0
        strategy = joint.strategy
        self._resend = strategy.settles and strategy.quorum < 1.0
        self.residuals = Residuals(joint.size, resend=self._resend)
        self._carrier = carrier
        self._rounds = carrier.rounds(self._ends())
        self.signals = time.queue()
        """What the main thread is to hear, in order."""
        self._commands: deque[Callable[[], None]] = deque()
        self._means = Means()
        self.donation = StateTransfer(self._tell, time.now)
        self._wants: list[tuple[int, int]] = []
        self._held: deque[Launch] = deque()
        """Rounds launched while a generation forms."""
        self.standing = Standing(fresh=fresh)
        self.station = self._station()
        self.follows_until: float = 0
        """Rounds before this are others': it serves them and contributes nothing. All, when its own rows are done."""
        self.in_step = False
        """Whether this worker launches all further rounds itself, also those that begin while it waits for the joint
        state: the other members of its group contribute to them."""
        self.digest = ""
        self.fits: Callable[[dict[str, Any]], bool] = lambda tree: True
        """Whether the main thread can take over what a peer gives."""
        self.progress: dict[str, Any] = {}
        """What the next heartbeat says."""
        self._last_beat = self._heard = self._joined_at = self.time.now()
        self.bytes_sent = self.bytes_received = self.aside_bytes = self._caught_published = 0

    def _ends(self) -> Ends:
        """What rounds are given of this worker."""
        return Ends(
            worker=self._identity.worker,
            joint=self._joint,
            link=self._link,
            send=self._send,
            lane=self.residuals.lane,
            clock=self.time.now,
            tell_not_finite=self.tell_not_finite,
        )

    def _station(self) -> Station:
        """What parts of the exchange are given of this worker."""
        return Station(
            identity=self._identity,
            joint=self._joint,
            trees=self._trees,
            time=self.time,
            rounds=self._rounds,
            signals=self.signals,
            standing=self.standing,
            tell=self._tell,
            command=self.command,
            obey=self.obey,
            wake=self._link.wake,
            tell_not_finite=self.tell_not_finite,
        )

    def tell_not_finite(self, worker: int, round: str, what: str, values: int) -> None:
        """Puts into the run's log that what a worker gave is not finite; the first times, for one may go on and on."""
        self._flaws += 1
        if self._stop_on_nonfinite:
            text = f"{values} values of the {what} of worker {worker} in round {round} are not finite"
            self.signals.put(Broken(DivergedError(text)))
        elif self._flaws <= MOST_FLAWS:
            fields = {"worker": worker, "what": what, "values": values, "round": round, "by": self._identity.worker}
            self._link.send(
                COORDINATOR, header_of(Happened(attempt=self._identity.attempt, kind="non_finite", fields=fields))
            )

    # -- training's own traffic -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def next_round(self) -> int:
        """The number of the round that would be claimed next."""

    @abstractmethod
    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round this worker is to launch next."""

    @abstractmethod
    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        """Launches a claimed round."""

    def withhold(self, round: int) -> None:
        """What has yet to be sent of a round counts for nothing: the step that makes it is not taken."""
        return

    def feed(self, round: int, keys: list[int], absent: frozenset[int]) -> None:
        """Sends tuples of a round whose values come one after the other; without tuples a round is launched whole."""
        return

    def abandon(self, round: int) -> None:
        """Gives up a round whose values, fed one after the other, were never all made."""
        return

    @abstractmethod
    def _holds(self, commit: Commit) -> bool:
        """Whether this worker has what the reference of a commit has."""

    @abstractmethod
    def _pause(self) -> None:
        """Lands what can be landed: a generation is about to form."""

    def _answer_of_table(self) -> dict[str, Any] | None:
        return None  # what to say of the table's tuples when a generation is about to form

    @abstractmethod
    def _go_on(self, commit: Commit, given_up: list[Launch]) -> None:
        """Takes up what was under way, in a generation that has just begun."""

    def _restarts(self, commit: Commit) -> bool:
        """Whether the joint model is lost, and this worker's replica takes its place."""
        return False

    def open(self, generation: int, model: Tensor | None) -> None:
        """The main thread has heard of the generation, and gives its replica where that is the joint model."""
        return

    def view(self, key: str) -> None:
        """Tells the main thread the joint model; where every worker has it, it is the one here."""
        model = self._joint.model
        self.signals.put(Averaged(key, torch.zeros(0) if model is None else model.clone(), {}))

    def announce(self, note: dict[str, Any]) -> None:
        return  # tells the first worker something outside of a round

    def _load(self, tree: dict[str, Any]) -> None:
        """Takes the joint state over."""
        self._joint.load(tree["joint"])

    def _loaded(self) -> None:
        return

    def _caught(self) -> None:
        return  # the main thread has been told of it

    def _asked(self, peer: int) -> None:
        self.signals.put(Asked(peer, self._rounds.generation))  # it needs the joint state, from the main thread

    def _receive(self, sender: int, body: Any, payload: memoryview | None) -> None:
        return  # takes in a peer's message of another kind than this class knows

    def _waiting_for(self) -> dict[str, list[int]]:
        """What is under way, and whom each waits for."""
        return self._rounds.waiting_for()

    def _work(self) -> None:
        """What each turn brings, while no generation is forming."""
        self._follow()
        self._rounds.tick()
        self._take_up_completed()

    def follow(self, until: float, *, in_step: bool = False) -> None:
        """Takes part in rounds before this one with nothing to contribute."""
        self.follows_until, self.in_step = until, in_step

    def estrange(self) -> None:
        """What the main thread has is no longer what the joint state says: it has to be given it anew."""
        self.standing.fresh = True

    # -- for any thread ---------------------------------------------------------------------------------------------

    def command(self, act: Callable[[], None]) -> None:
        """Has something done on the exchange thread, soon."""
        self._commands.append(act)
        self._link.wake()

    # -- for the exchange thread ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Asks for a seat, once the codec's loops are loaded: later they would take the processor from training."""
        warm_up(codec(self._joint.cuts.newest.setting.codec or self._codec_name))
        join = Join(attempt=self._identity.attempt, address=self._link.address, **self._identity.hello)
        self._link.send(COORDINATOR, header_of(join))

    def _rejoin(self) -> None:
        """Its place was given up while it could not be heard, and nobody else has taken it."""
        if self.time.now() - self._joined_at > REJOIN_S:
            self._joined_at, self.standing.frozen = self.time.now(), True
            self.join()

    def finish(self) -> None:
        """Does what was still asked for, and says a last word."""
        self.obey()
        self.beat()

    def obey(self) -> None:
        """Does what was asked for on other threads."""
        while self._commands:
            self._commands.popleft()()

    def close(self) -> None:
        return  # lets go of what it holds beside the link

    def turn(self) -> None:
        """One round of messages, commands, rounds and beats."""
        until_beat = max(TICK_S, self._last_beat + BEAT_S - self.time.now())
        for message in self._link.receive(TICK_S if self._rounds.waiting else until_beat):
            if message.sender == COORDINATOR:
                self._heard = self.time.now()
                self._from_coordinator(TO_WORKER.decode(message.header))
            else:
                self.bytes_received += 0 if message.payload is None else message.payload.nbytes
                try:
                    self._from_peer(message)
                except REFUSED as error:
                    self._refuse(message.sender, error)
        self.obey()
        now = self.time.now()
        if not self.standing.frozen:
            self._work()
            if self.standing.needs_state:
                self.donation.tick()
        if now - self._last_beat >= BEAT_S:
            self.beat()
        if now - self._heard > self._silence_s:
            raise CutOffError(
                f"worker {self._identity.worker} has heard nothing from the coordinator for {self._silence_s:.0f} s; "
                "it has probably ended, so this worker ends too"
            )

    def _refuse(self, sender: int, error: Exception) -> None:
        self._rounds.refused += 1
        if self._rounds.refused <= MOST_LOGGED:
            _log.warning("worker %s refused a message of worker %s: %s", self._identity.worker, sender, error)

    def beat(self, *, sure: bool = False) -> None:
        """Says how far this worker is; surely, where no later beat would make up for a lost one."""
        self._last_beat = self.time.now()
        beat = Beat(
            attempt=self._identity.attempt,
            landed=self._joint.landed,
            progress=self.progress,
            sent_bytes=self.bytes_sent + self.aside_bytes,
            received_bytes=self.bytes_received,
            waiting=self._waiting_for(),
            refused=self._rounds.refused + getattr(self._link, "refused", 0),
            sure=sure,
        )
        self._link.send(COORDINATOR, header_of(beat))

    def _send(self, peer: int, body: Body, payload: memoryview | None) -> None:
        self.bytes_sent += 0 if payload is None else payload.nbytes
        self._link.send(peer, header_of(body), payload)

    def _tell(self, peer: int, kind: Callable[..., Body], payload: memoryview | None = None, /, **fields: Any) -> None:
        """Sends a message of this generation to another worker."""
        stamp = {"generation": self._rounds.generation, "attempt": self._identity.attempt}
        self._send(peer, kind(**stamp | fields), payload)

    # -- generations ------------------------------------------------------------------------------------------------

    def _from_coordinator(self, body: Body) -> None:
        if isinstance(body, Prepare):
            if not self.standing.frozen:  # what is complete counts as landed: nobody will launch it again
                self._pause()
            self.standing.frozen = True
            answer = Prepared(
                attempt=self._identity.attempt,
                generation=body.generation,
                landed=self._joint.landed,
                fresh=self.standing.fresh or self.standing.needs_state,
                since=self.standing.since,
                digest=self.digest,
                table=self._answer_of_table(),
            )
            self._link.send(COORDINATOR, header_of(answer))
        elif isinstance(body, Commit):
            self._commit(body)
        elif isinstance(body, Rejoin):
            self._rejoin()
        elif not isinstance(body, Pong):
            self.signals.put(Told(body))

    def _commit(self, commit: Commit) -> None:
        me = self._identity.worker
        mine = commit.members[me]
        attempts = {worker: int(entry["attempt"]) for worker, entry in commit.members.items()}
        self._link.connect({worker: entry["address"] for worker, entry in commit.members.items() if worker != me})
        reference, landed = self.standing.reference, self.standing.landed = commit.reference, commit.landed
        earlier = self._rounds.members  # none yet in a run that goes on from a checkpoint
        given_up = self._rounds.configure(commit.generation, attempts, self._over(landed))
        self.residuals.share(earlier, stale="position" in mine)  # after the sums of rounds given up are undone
        standing, same = self.standing, self.standing.since == commit.since and self._holds(commit)
        standing.needs_state = me != reference and not same
        standing.since = standing.since if standing.needs_state else commit.generation
        standing.fresh = standing.frozen = False
        if self.standing.needs_state:
            self.donation.want(reference)
        self.signals.put(
            Formed(
                generation=commit.generation,
                members=self._rounds.members,
                lead=me == self._rounds.members[0],
                needs_state=self.standing.needs_state,
                restart=self._restarts(commit),
                position=tuple(mine["position"]) if mine.get("position") else None,
                steps=int(mine.get("steps", 0)),
                first_loss=mine.get("first_loss"),
                totals=dict(commit.totals),
                total_rows=commit.total_rows,
                group=commit.group or {},
            )
        )
        self._go_on(commit, given_up)
        self._answer_wants()
        if not self.standing.needs_state:
            self._synchronised()

    def _synchronised(self) -> None:
        generation, num_members = self._rounds.generation, len(self._rounds.members)
        model = self._joint.model if self._joint.strategy.timing != "async" else None
        self._joint.observe(Synchronised(generation, num_members, self._joint.landed, model))

    def _over(self, landed: int) -> Callable[[str], bool]:
        """Tells which rounds the reference has landed."""
        return lambda key: False

    # -- peers ------------------------------------------------------------------------------------------------------

    def _from_peer(self, message: Message) -> None:
        body, sender = self._carrier.decode(message), message.sender
        if isinstance(body, Want):
            self._wants = [*self._wants[-MOST_WANTS:], (body.generation, sender)]
            self._answer_wants()
        elif isinstance(body, State):
            if not self.standing.frozen and body.generation == self._rounds.generation:
                self._take_state(sender, body, message.payload)
        elif not isinstance(body, self._carrier.kinds):
            self._receive(sender, body, message.payload)
        elif not (self.standing.frozen and body.generation == self._rounds.generation):
            self._rounds.receive(sender, body, message.payload)

    def _answer_wants(self) -> None:
        """Passes requests on to the main thread; one from a generation not heard of yet waits for its commit."""
        now = [peer for g, peer in self._wants if g == self._rounds.generation and not self.standing.frozen]
        self._wants = [(g, peer) for g, peer in self._wants if g >= self._rounds.generation and peer not in now]
        for peer in now:
            self._asked(peer)

    def _take_state(self, sender: int, state: State, payload: memoryview | None) -> None:
        if not self.standing.needs_state or payload is None:
            return
        data = self.donation.take(sender, state, payload)
        if data is None:
            return
        tree = self._trees.decode(data)
        if not isinstance(tree, dict) or not isinstance(tree.get("joint"), dict) or not self.fits(tree):
            raise ProtocolError(f"worker {sender} sent a joint state that is not one")
        if int(tree["joint"]["landed"]) < self.standing.landed:
            return  # copied before this generation: rounds between are nobody's to launch again, a newer one comes
        old = None if self._joint.model is None else self._joint.model.clone()
        self._load(tree)
        self.standing.needs_state, self.standing.since = False, self._rounds.generation
        self._caught_published = int(tree.get("published", 0))
        self._loaded()
        self.signals.put(Caught(tree, old))
        self._caught()
        self._synchronised()

    # -- means ------------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        """Starts a round, or keeps it until the generation under way has formed."""
        if self.standing.frozen:
            self._held.append(launch)
        else:
            self._start_round(launch)

    def _start_round(self, launch: Launch) -> None:
        self._rounds.launch(launch)

    def _follow(self) -> None:
        """Takes part, with nothing, in means that others want and this worker's main thread does not."""
        for key, fragment, name in self._rounds.wanted():
            if self._passes_over(key):
                self._rounds.launch(self._means.aside(key, fragment, name, self._note()))

    def _passes_over(self, key: str) -> bool:
        publication = number(key, "buffers")  # the main thread has no part in those before it caught up
        over = publication is not None and publication <= self._caught_published
        return self.standing.needs_state or key in self._means or over

    def _note(self) -> dict[str, Any]:
        return dict(self.progress.get("note", {}))

    def _take_up_completed(self) -> None:
        for done in self._rounds.completed():
            self._take_up(done)

    def _take_up(self, done: Completed) -> None:
        self._rounds.settle(done.key)
        self.signals.put(self._means.take(done))
