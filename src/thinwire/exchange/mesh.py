"""One worker's part in a mesh: rounds, generations, heartbeats, as a machine that an exchange thread turns.

How a generation begins, and why nothing is lost on the way::

    1. coordinator: prepare(g)     every worker stops merging, and answers with its generation and rounds landed
    2. coordinator: commit(g)      members, the reference (of the newest generation, who landed most), its count L
    3. worker with both            launches its open rounds again, among the new members
       worker behind, or new       asks the reference for the joint state; meanwhile it takes part in rounds with
                                   no contribution, so that nobody waits for it, and keeps their means
    4. the state arrives           it is loaded, the kept means after it are merged: this worker holds what all hold
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.engine.joint import JointState
from thinwire.engine.ports import COORDINATOR, Header, Link, Message
from thinwire.engine.signals import Asked, Averaged, Caught, CutOffError, Formed, Landed, Signal, Told
from thinwire.engine.snapshot import Snapshot
from thinwire.engine.spares import Spares
from thinwire.errors import ProtocolError
from thinwire.exchange.keys import before, number, train_number
from thinwire.exchange.parcel import Parcel, pieces
from thinwire.exchange.residuals import Residuals
from thinwire.exchange.rounds import Completed, Launch, Rounds
from thinwire.exchange.seat import Seat, Trees
from thinwire.parameters import Fragment
from thinwire.rules.compression import codec, warm_up

BEAT_S = 0.5
REJOIN_S = 3.0
TICK_S = 0.05
"""How often a round is looked at that may have to end without all; otherwise this thread only wakes for messages."""


class Mesh:
    """The machine. `claim`, `command` and what they need are safe on any thread; the rest belongs to one."""

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
        self._link, self._seat, self._joint, self._trees = link, seat, joint, trees
        self._codec_name, self._silence_s = codec_name, silence_s
        strategy = joint.strategy
        self._resend = strategy.settles and strategy.quorum < 1.0
        self.residuals = Residuals(joint.size, resend=self._resend)
        self._rounds = Rounds(
            seat.worker,
            self._send,
            self.residuals.lane,
            quorum=strategy.quorum,
            grace_s=strategy.grace_s,
            longest=joint.size + (1 << 24),  # one-off means, of buffers say, may be longer than the model
        )
        self.signals: queue.SimpleQueue[Signal] = queue.SimpleQueue()
        """What the main thread is to hear, in order."""
        self._commands: deque[Callable[[], None]] = deque()
        self._numbering = threading.Lock()
        self._next_round = joint.landed
        self._claimed: set[int] = set()
        """Rounds whose snapshots are on the way from the main thread."""
        self._ready: dict[int, Completed] = {}
        self._contributed: set[int] = set()
        self._values: dict[int, Tensor] = {}
        self._spares = Spares(strategy.in_flight)
        self._averaged: set[str] = set()
        self._caught_published = 0
        self._parcel = Parcel()
        self._wants: list[tuple[int, int]] = []
        self._agreed = (-1, 0)
        """This generation's reference, and the rounds that it had landed."""
        self._held: deque[Launch] = deque()
        self._fresh, self._needs_state, self._since = fresh, False, 0  # since: the newest generation it shared in
        self._frozen = True
        self.following = False
        """Whether to take part in rounds without contributing."""
        self.digest = ""
        self.progress: dict[str, Any] = {}
        """What the next heartbeat says."""
        self._last_beat = self._heard = self._joined_at = time.monotonic()
        self.bytes_sent = 0

    # -- for any thread ---------------------------------------------------------------------------------------------

    def command(self, act: Callable[[], None]) -> None:
        """Has something done on the exchange thread, soon."""
        self._commands.append(act)
        self._link.wake()

    def claim(self) -> tuple[int, Fragment]:
        """The number and fragment of the round this worker is to launch next."""
        with self._numbering:
            round = self._next_round
            self._next_round += 1
            self._claimed.add(round)
        return round, self._joint.fragment(round)

    @property
    def next_round(self) -> int:
        with self._numbering:
            return self._next_round

    # -- for the exchange thread ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Asks for a seat, once the codec's loops are loaded: later they would take the processor from training."""
        warm_up(codec(self._joint.cuts.newest.setting.codec or self._codec_name))
        seat = self._seat
        self._link.send(COORDINATOR, {"t": "join", "a": seat.attempt, "address": self._link.address, **seat.hello})

    def _rejoin(self) -> None:
        """Its place was given up while it could not be heard, and nobody else has taken it."""
        if time.monotonic() - self._joined_at > REJOIN_S:
            self._joined_at, self._frozen = time.monotonic(), True
            self.join()

    def contribute(
        self, round: int, fragment: Fragment, snapshot: Snapshot | Tensor | None, weight: float, note: dict[str, Any]
    ) -> None:
        """Launches a claimed round."""
        name = self._joint.cuts.at(round).setting.codec or self._codec_name
        values = None
        if snapshot is not None and weight > 0:
            spare = self._spares.take(fragment.size)
            taken = snapshot.take() if isinstance(snapshot, Snapshot) else snapshot
            values = self._joint.contribution(fragment, taken, out=spare)
            if values is spare:  # until the round has landed: it may have to be launched again
                self._values[round] = spare
        with self._numbering:
            self._claimed.discard(round)
        self.launch(Launch(f"train:{round}", fragment, name, values, weight, note))

    def hand_over(self, peer: int, data: bytes) -> None:
        """Sends the joint state to a peer, in pieces."""
        for index, count, piece in pieces(data):
            self._send(peer, self._stamped("state") | {"i": index, "n": count}, piece)

    def finish(self) -> None:
        """Does what was still asked for, and says a last word."""
        while self._commands:
            self._commands.popleft()()
        self.beat()

    def turn(self) -> None:
        """One round of messages, commands, rounds and beats."""
        until_beat = max(TICK_S, self._last_beat + BEAT_S - time.monotonic())
        for message in self._link.receive(TICK_S if self._rounds.waiting else until_beat):
            if message.sender == COORDINATOR:
                self._heard = time.monotonic()
                self._from_coordinator(message.header)
            else:
                try:
                    self._from_peer(message)
                except (KeyError, TypeError, ValueError, OverflowError):
                    self._rounds.refused += 1
        while self._commands:
            self._commands.popleft()()
        if not self._frozen:
            self._follow()
            self._rounds.tick()
            self._take_up_completed()
        now = time.monotonic()
        if now - self._last_beat >= BEAT_S:
            self.beat()
        if now - self._heard > self._silence_s:
            raise CutOffError(
                f"worker {self._seat.worker} has heard nothing from the coordinator for {self._silence_s:.0f} s; "
                "it has probably ended, so this worker ends too"
            )

    def beat(self) -> None:
        self._last_beat = time.monotonic()
        header: Header = {"t": "beat", "a": self._seat.attempt, "landed": self._joint.landed}
        header |= {"waiting": self._rounds.waiting_for(), "bytes": self.bytes_sent, "progress": self.progress}
        header["refused"] = self._rounds.refused + getattr(self._link, "refused", 0)
        self._link.send(COORDINATOR, header)

    def _send(self, peer: int, header: Header, payload: memoryview | None) -> None:
        self.bytes_sent += 0 if payload is None else payload.nbytes
        self._link.send(peer, header, payload)

    def _stamped(self, kind: str) -> Header:
        return {"t": kind, "g": self._rounds.generation, "a": self._seat.attempt}

    # -- generations ------------------------------------------------------------------------------------------------

    def _from_coordinator(self, header: Header) -> None:
        kind = header["t"]
        if kind == "prepare":
            if not self._frozen:  # what is complete counts as landed: nobody will launch it again
                self._take_up_completed()
            self._frozen = True
            answer = {
                "t": "prepared",
                "a": self._seat.attempt,
                "g": header["g"],
                "landed": self._joint.landed,
                "fresh": self._fresh or self._needs_state,
                "since": self._since,
                "digest": self.digest,
            }
            self._link.send(COORDINATOR, answer)
        elif kind == "commit":
            self._commit(header)
        elif kind != "pong":
            self._rejoin() if kind == "rejoin" else self.signals.put(Told(header))

    def _commit(self, header: Header) -> None:
        me = self._seat.worker
        attempts = {int(k): int(v["attempt"]) for k, v in header["members"].items()}
        self._link.connect({int(k): v["address"] for k, v in header["members"].items() if int(k) != me})
        reference, landed = self._agreed = int(header["reference"]), int(header["landed"])
        earlier = self._rounds.members  # none yet in a run that goes on from a checkpoint
        given_up = self._rounds.configure(int(header["g"]), attempts, lambda key: before(key, landed))
        self.residuals.share(earlier)  # after the sums of rounds given up are undone
        for round in [r for r in {*self._values, *self._contributed} if r < landed]:
            self._forget(round)
        fresh = self._fresh or self._needs_state
        same = self._since == int(header["since"])  # else the others went on without it, be it in as many rounds
        same &= landed == 0 and header["digest"] == self.digest if fresh else self._joint.landed == landed
        self._needs_state = me != reference and not same
        self._fresh = False
        self._since = self._since if self._needs_state else int(header["g"])
        self._frozen = False
        self._parcel = Parcel()
        self._ready = {}
        if self._needs_state:
            self._send(reference, self._stamped("want"), None)
        mine = header["members"][str(me)]
        self.signals.put(
            Formed(
                generation=int(header["g"]),
                members=self._rounds.members,
                lead=me == self._rounds.members[0],
                needs_state=self._needs_state,
                position=tuple(mine["position"]) if mine.get("position") else None,
                steps=int(mine.get("steps", 0)),
                totals={int(k): int(v) for k, v in header["totals"].items()},
                total_rows=int(header["rows"]),
            )
        )
        self._relaunch(given_up, landed)
        self._answer_wants()

    def _relaunch(self, given_up: list[Launch], landed: int) -> None:
        """Rounds that nobody landed start again; those that the reference landed are over."""
        held, self._held = self._held, deque()
        again = [launch for launch in [*given_up, *held] if not before(launch.key, landed)]
        with self._numbering:
            self._next_round = max(self._next_round, landed)
            known = {train_number(launch.key) for launch in again} | self._claimed
            gone = [] if self._needs_state else [r for r in range(landed, self._next_round) if r not in known]
        for round in gone:  # dropped for a joint state that had them, and was lost with its holder: land without it
            name = self._joint.cuts.at(round).setting.codec or self._codec_name
            again.append(Launch(f"train:{round}", self._joint.fragment(round), name, None, 0.0, {}))
        for launch in sorted(again, key=lambda launch: train_number(launch.key) or 0):
            self._start_round(launch)

    # -- peers ------------------------------------------------------------------------------------------------------

    def _from_peer(self, message: Message) -> None:
        kind = message.header["t"]
        if kind in ("part", "sum", "open"):
            if not (self._frozen and message.header.get("g") == self._rounds.generation):
                self._rounds.receive(message.sender, message.header, message.payload)
        elif kind == "want":
            self._wants.append((int(message.header["g"]), message.sender))
            self._answer_wants()
        elif kind == "state" and not self._frozen and message.header.get("g") == self._rounds.generation:
            self._take_state(message)

    def _answer_wants(self) -> None:
        """Passes requests on to the main thread; one from a generation not heard of yet waits for its commit."""
        now = [peer for g, peer in self._wants if g == self._rounds.generation and not self._frozen]
        self._wants = [(g, peer) for g, peer in self._wants if g >= self._rounds.generation and peer not in now]
        for peer in now:
            self.signals.put(Asked(peer))

    def _take_state(self, message: Message) -> None:
        if not self._needs_state or message.payload is None or message.sender != self._agreed[0]:
            return  # from another than the reference: pieces of two states must not be mixed
        data = self._parcel.add(int(message.header["i"]), int(message.header["n"]), message.payload)
        if data is None:
            return
        tree = self._trees.decode(data)
        if not isinstance(tree, dict):
            raise ProtocolError(f"worker {message.sender} sent a joint state that is not one")
        if int(tree["joint"]["landed"]) < self._agreed[1]:
            return  # copied before this generation: rounds between are nobody's to launch again, a newer one comes
        old = None if self._joint.model is None else self._joint.model.clone()
        self._joint.load(tree["joint"])
        self._needs_state, self._since = False, self._rounds.generation
        self._caught_published = int(tree.get("published", 0))
        with self._numbering:
            self._next_round = max(self._next_round, self._joint.landed)
        self.signals.put(Caught(tree, old))
        for round in [r for r in self._ready if r < self._joint.landed]:
            self._forget(round)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        """Starts a round, or keeps it until the generation under way has formed."""
        if self._frozen:
            self._held.append(launch)
        else:
            self._start_round(launch)

    def _start_round(self, launch: Launch) -> None:
        round = train_number(launch.key)
        if self._rounds.launch(launch) and round is not None and launch.values is not None:
            self._contributed.add(round)

    def _follow(self) -> None:
        wanted = self._rounds.wanted()
        if not wanted:
            return
        trains = sorted(r for r in (train_number(key) for key, _, _ in wanted) if r is not None)
        for key, fragment, name in wanted:
            round = train_number(key)
            if round is None:
                publication = number(key, "buffers")  # the main thread has no part in those before it caught up
                over = publication is not None and publication <= self._caught_published
                follow = self._needs_state or key in self._averaged or over
            else:
                behind = self._resend and round != trains[-1]  # a quorum went on without this worker
                follow = self._needs_state or self.following or behind
            if not follow:
                continue
            with self._numbering:
                if round is not None:
                    if round < self._next_round and not self.following and not self._needs_state:
                        continue  # claimed by the main thread: its snapshot is on the way
                    self._next_round = max(self._next_round, round + 1)
            self._rounds.launch(Launch(key, fragment, name, None, 0.0, dict(self.progress.get("note", {}))))

    def _take_up_completed(self) -> None:
        for done in self._rounds.completed():
            round = train_number(done.key)
            if round is None:
                self._averaged.add(done.key)
                self._rounds.settle(done.key)
                self.signals.put(Averaged(done.key, done.mean, done.notes))
            else:
                self._ready[round] = done
                if round < self._joint.landed:  # the joint state that came from a peer had it already
                    self._forget(round)
        self._land_ready()

    def _forget(self, round: int) -> None:
        """Lets go of a round that is over."""
        self._ready.pop(round, None)
        self._contributed.discard(round)
        self._rounds.settle(f"train:{round}")
        if (values := self._values.pop(round, None)) is not None:
            self._spares.give(values)

    def _land_ready(self) -> None:
        while not self._needs_state and self._joint.landed in self._ready:
            round = self._joint.landed
            done, own = self._ready[round], round in self._contributed
            snapshot = None if own else self._joint.old_model(done.fragment)
            reply = self._joint.land(round, done.fragment, done.mean, out=done.mean)
            self._forget(round)
            publish = save = False
            for note in done.notes.values():
                if "setting" in note:
                    self._joint.change(note["setting"], int(note["since"]))
                publish |= "publish" in note
                save |= "save" in note
            model = self._joint.model
            self.signals.put(
                Landed(
                    round=round,
                    fragment=done.fragment,
                    reply=reply,
                    snapshot=snapshot,
                    notes=done.notes,
                    model=model.clone() if publish and model is not None else None,
                    joint=self._joint.tree() if save else None,
                    seconds=done.seconds,
                    size_bytes=done.size_bytes,
                )
            )
