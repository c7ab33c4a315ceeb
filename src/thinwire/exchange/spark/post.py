"""The driver's end: short Spark jobs that carry letters, sum contributions, and bring means.

Each machine has a thread here that sends one short job after another to it. A job brings what there is to bring, waits
there a moment for something to be said, and comes back with it: a contribution is on its way as soon as it is made.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from thinwire import events
from thinwire.errors import ConfigError, ThinwireError, WorkerError
from thinwire.exchange.member import REFUSED
from thinwire.exchange.round import BY_DESIGN
from thinwire.exchange.spark.link import SPARK, Letter, SparkWire, name_of
from thinwire.exchange.spark.places import Places
from thinwire.exchange.spark.slots import FreeSlots, Mover, machines, may_grow, visits_description
from thinwire.exchange.spark.sums import PATIENCE_S, Gathering, is_possible, shuffled
from thinwire.exchange.spark.tasks import Members, carry_mail
from thinwire.protocol.forms import Header, header_of
from thinwire.protocol.messages import COORDINATOR, TO_WORKER, Commit, Happened, Message, SparkOpen, SparkSum
from thinwire.rules.compression import codec

_log = logging.getLogger("thinwire.spark")
IDLE_S, WAIT_S, BRIEF_S = 0.1, 0.25, 0.01
"""How long a visit waits for something to be said; and while a machine's agents wait for a mean."""
OWING_S = 0.3
UNSEEN_S, FORGET_S = 3.0, 60.0
WATCH_S = 1.0
"""Between two looks at what has the slots, while an agent is not seen."""
LONG_BYTES = 256 << 10
IN_FLIGHT = 3
"""Rounds that are read, summed and sent at once: one each, as in MPCA's Fig. 8."""


class Shared:
    """A broadcast that several letters carry; destroyed with the last of them."""

    def __init__(self, broadcast: Any, letters: int) -> None:
        self.broadcast, self._left = broadcast, letters
        self._lock = threading.Lock()

    def drop(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                with contextlib.suppress(Exception):  # its file, or the session, may be gone
                    self.broadcast.destroy()


@dataclass
class _Bag:
    """Letters to one agent that it has not been seen to have, and the last one that came from it."""

    where: str | None = None
    """Its machine, once it has been seen there."""
    letters: list[Letter] = field(default_factory=list)
    number: int = 0
    ack: int = 0
    seen_at: float = field(default_factory=time.monotonic)


class Post:
    """Carries everything between the coordinator and the agents of one run."""

    def __init__(self, session: Any, wire: SparkWire, workers: int) -> None:
        self._context, self._wire, self._workers = session.sparkContext, wire, workers
        self._tag = f"thinwire-post-{wire.run}"
        self.gone: list[tuple[int, int]] = []
        """Agents that have ended, by worker and attempt, for the hub to tell."""
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.notices: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._bags: dict[str, _Bag] = {}
        self._lock = threading.Condition(threading.RLock())
        self._generation = 0
        self._attempts: dict[int, int] = {}
        self._rounds: dict[str, Gathering] = {}
        self._places = Places(self._context, wire)
        self._mover = Mover(self._context, self._name_jobs)
        self._visited: set[str] = set()
        """Machines that a job is at."""
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "spark-rounds", initializer=self._name_jobs)
        self._open, self._closing = True, threading.Event()
        self.jobs = self.broadcasts = self.settled = self.refused = 0
        self._visitors: dict[str, threading.Thread] = {}
        self._watchers = [
            threading.Thread(target=self._look_around, name="spark-post", daemon=True),
            threading.Thread(target=self._keep_slots_free, name="spark-slots", daemon=True),
        ]
        for thread in self._watchers:
            thread.start()

    def _name_jobs(self) -> None:
        """Jobs of this thread are told apart in Spark's pages, and can be cancelled."""
        self._context.setJobGroup(self._tag, visits_description(self._wire.run), interruptOnCancel=True)
        self._context.addJobTag(self._tag)

    def put(self, name: str, sender: int, header: Header, payload: Any = None) -> None:
        """A letter for an agent; a long one travels as a broadcast, which a closure would never let go of."""
        if isinstance(payload, bytes) and len(payload) > LONG_BYTES:
            payload = Shared(self._context.broadcast(payload), 1)
        with self._lock:
            bag = self._bags.setdefault(name, _Bag())
            bag.number += 1
            bag.letters.append(Letter(bag.number, sender, header, payload))
            self._lock.notify_all()

    def begin(self, generation: int, attempts: dict[int, int]) -> None:
        """A generation is about to begin: rounds of earlier ones are over."""
        with self._lock:
            if generation != self._generation:
                self._generation, self._attempts, self._rounds = generation, attempts, {}

    def close(self) -> None:
        """Ends what runs, and lets go of what Spark holds for it."""
        with self._lock:
            self._open = False
            self._lock.notify_all()
        self._closing.set()
        with contextlib.suppress(Exception):  # here and below: the session may have ended
            self._context.cancelJobsWithTag(self._tag)
        for thread in (*self._watchers, *self._visitors.values()):
            thread.join(20.0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock, contextlib.suppress(Exception):
            for bag in self._bags.values():
                _drop(bag.letters)
            self._bags = {}
            self._places.close()

    # -- machines ---------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Finds the machines that agents are on, again whenever executors come or go, and sees to it that each is
        visited.
        """
        self._name_jobs()
        failing_since: float | None = None
        while self._open:
            try:
                if self._is_lost():
                    self.jobs += 1
                    self._places.look()
                failing_since = None
            except Exception as error:  # an executor died under the job, or the session has ended
                failing_since = failing_since or time.monotonic()
                if self._gives_up(error, failing_since):
                    return
            for machine in self._places.machines():
                if machine not in self._visitors or not self._visitors[machine].is_alive():
                    self._visitors[machine] = threading.Thread(target=self._serve, args=(machine,), daemon=True)
                    self._visitors[machine].start()
            with self._lock:
                if self._open:
                    self._lock.wait(IDLE_S)

    def _keep_slots_free(self) -> None:
        """Has agents that nobody can visit started again elsewhere. A thread of its own: where all slots are taken,
        `_look_around` waits for one itself.
        """
        context, wire, workers = self._context, self._wire, self._workers
        free = FreeSlots(
            lambda: machines(context, workers=workers, run=wire.run, apart=wire.apart),
            self._mover,
            workers,
            may_grow=may_grow(context),
        )
        while self._open:
            try:
                with self._lock:
                    seen = {name: bag.seen_at for name, bag in self._bags.items() if bag.where is not None}
                    begun = self._generation > 0
                if sum(time.monotonic() - at < UNSEEN_S for at in seen.values()) < workers:
                    heard = {int(name.partition(".")[2]): at for name, at in seen.items()}
                    for event in free.look(heard, begun=begun):
                        self.notices.put(event)
            except ConfigError as error:
                self.error = error
                return
            except Exception as error:  # the session may have ended; a Spark that tells less trains all the same
                _log.debug("what has the cluster's slots is not known: %s", error)
            self._closing.wait(WATCH_S)

    def _gives_up(self, error: Exception, since: float) -> bool:
        """Whether jobs have failed for so long that the run is to end."""
        if time.monotonic() - since > PATIENCE_S:
            self.error = _explained(error)
        return self.error is not None

    def _is_lost(self) -> bool:
        """Whether executors have come or gone, or an agent is not seen; one whose machine is just visited may be."""
        now = time.monotonic()
        if now < self._mover.quiet_until:
            return False
        if self._places.changed():
            return True
        with self._lock:
            here = [bag for bag in self._bags.values() if now - bag.seen_at < UNSEEN_S or bag.where in self._visited]
        return len(here) < self._workers and self._places.due(now)

    # -- letters ----------------------------------------------------------------------------------------------------

    def _serve(self, machine: str) -> None:
        """Visits one machine again and again, for as long as it is among the places."""
        failing_since: float | None = None
        self._name_jobs()
        while self._open:
            if (place := self._places.of(machine)) is None:
                return
            try:
                with self._lock:
                    self._visited.add(machine)
                if not self._carry(machine, *place):
                    self._places.leave(machine)
                failing_since = None
            except Exception as error:  # an executor died under the job, or the session has ended
                failing_since = failing_since or time.monotonic()
                if self._gives_up(error, failing_since):
                    return
                self._places.doubt()
                time.sleep(IDLE_S)
            finally:
                with self._lock:
                    self._visited.discard(machine)

    def _carry(self, machine: str, marker: Any, place: int) -> bool:
        """One job that visits every box of a machine; False where it came to another one."""
        frames: list[Any] = []
        known: dict[int, int] = {}
        with self._lock:
            self._forget_the_dead()
            wait_s = WAIT_S
            if self._owes(machine):  # a mean will come, and is not to find the slot taken
                self._lock.wait_for(lambda: not self._owes(machine) or not self._open, OWING_S)
                wait_s = BRIEF_S if self._owes(machine) else WAIT_S
            bags: dict[str, Any] = {}
            for name, bag in self._bags.items():
                if bag.where not in (machine, None):
                    continue
                letters = []
                for letter in bag.letters:
                    frame = None
                    if letter.payload is not None:
                        frame = known.setdefault(id(letter.payload), len(frames))
                        if frame == len(frames):
                            shared = isinstance(letter.payload, Shared)
                            frames.append(letter.payload.broadcast if shared else letter.payload)
                    letters.append((letter.number, letter.other, letter.header, frame))
                bags[name] = {"letters": letters, "ack": bag.ack}
            names = {name_of(worker, attempt): worker for worker, attempt in self._attempts.items()}
            members = Members(self._generation, names)
        self.jobs += 1
        task = functools.partial(carry_mail, self._wire, machine, bags, frames, wait_s, members)
        rows = self._context.runJob(marker, task, [place])
        header = json.loads(rows[0])
        if "elsewhere" in header or not header["boxes"]:
            time.sleep(IDLE_S)
            return False
        parts, pieces = [], iter(rows[1:])
        for size in header["sizes"]:
            found, start = memoryview(bytearray(size)), 0
            while start < size:
                piece = next(pieces)
                found[start : start + len(piece)] = piece
                start += len(piece)
            parts.append(found)
        self._came(machine, header["boxes"], parts)
        return True

    def _owes(self, machine: str) -> bool:
        """Whether all agents of a machine have given something to a round whose mean has not been sent."""
        here = {int(n.partition(".")[0]) for n, bag in self._bags.items() if bag.where == machine} & set(self._attempts)
        return bool(here) and any(here <= set(entry.weights) for entry in self._rounds.values())

    def _forget_the_dead(self) -> None:
        """Letters to those who have not been seen for long, and are not members, are nobody's."""
        members, now = {name_of(w, a) for w, a in self._attempts.items()}, time.monotonic()
        for name, bag in self._bags.items():
            if name not in members and now - bag.seen_at > FORGET_S:
                _drop(bag.letters)
                bag.letters = []

    def _came(self, machine: str, boxes: dict[str, Any], parts: list[memoryview]) -> None:
        """Takes up what a visit brought, all of it or nothing: contributions of a machine come as one."""
        routes: list[tuple[str, int, Header, memoryview | None]] = []
        with self._lock:
            for name, told in boxes.items():
                if told.get("gone"):
                    worker, _, attempt = name.partition(".")
                    self.gone.append((int(worker), int(attempt)))
                    continue
                bag = self._bags.setdefault(name, _Bag())
                bag.where, bag.seen_at = machine, time.monotonic()
                had = [letter for letter in bag.letters if letter.number <= int(told["seen"])]
                bag.letters = [letter for letter in bag.letters if letter.number > int(told["seen"])]
                _drop(had)
            there = {name: told["letters"] for name, told in boxes.items() if not told.get("gone")}
            if any(int(letter[0]) <= self._bags[name].ack for name, letters in there.items() for letter in letters):
                return  # another visit has brought some of it: the next one brings the rest
            for name, letters in there.items():
                for number, to, inner, part in letters:
                    self._bags[name].ack = int(number)
                    routes.append((name, int(to), inner, None if part is None else parts[int(part)]))
        for route in routes:
            try:
                self._route(*route)
            except REFUSED as error:
                self.refused += 1
                _log.warning("a letter of %s was refused: %s", route[0], error)

    def _route(self, name: str, to: int, header: Header, payload: memoryview | None) -> None:
        worker = int(name.partition(".")[0])
        if to != COORDINATOR:
            if to in self._attempts:
                self.put(name_of(to, self._attempts[to]), worker, header, None if payload is None else bytes(payload))
        elif header["t"] == "launched":
            self._launched(worker, header, payload)
        elif header["t"] == "settled":
            self.settled += 1
            if header.get("x"):
                self._tell(worker, header)
        else:
            self.inbox.put(Message(worker, header, payload))

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _launched(self, worker: int, header: Header, payload: memoryview | None) -> None:
        with self._lock:
            if header["g"] != self._generation or self._attempts.get(worker) != header["a"]:
                return
            key, fragment = str(header["r"]), (int(header["s"][0]), int(header["s"][1]))
            if not is_possible(header, fragment, payload):
                self.refused += 1
                return
            if key not in self._rounds:
                by_design = key.partition(":")[0] in BY_DESIGN
                self._rounds[key] = Gathering(fragment, codec(str(header["k"])), may_be_infinite=by_design)
                news = SparkOpen(generation=self._generation, round=key, span=fragment, codec=str(header["k"]))
                for other, attempt in self._attempts.items():
                    if other != worker:
                        self.put(name_of(other, attempt), SPARK, header_of(news))
            found = self._rounds[key]
            if found.fragment != fragment or found.codec.name != header["k"] or worker in found.weights:
                raise ValueError(f"round {key} is of {found.fragment} in {found.codec.name}, and each gives once")
            found.weights[worker], found.notes[worker] = float(header["w"]), dict(header["n"])
            if header.get("x"):
                found.dropped.add(worker)
                self._tell(worker, header)
            if payload is not None:
                found.add(payload, float(header["w"]))
            if set(found.weights) == set(self._attempts):
                self._pool.submit(self._exchange, key, found, self._generation, dict(self._attempts))

    def _tell(self, worker: int, header: Header) -> None:
        """Puts into the run's log that what a worker gave is not finite."""
        fields = {"worker": worker, "what": "contribution", "values": int(header["x"]), "round": str(header["r"])}
        event = Happened(attempt=int(header["a"]), kind="non_finite", fields=fields)
        self.inbox.put(Message(worker, header_of(event), None))

    def _exchange(self, key: str, found: Gathering, generation: int, attempts: dict[int, int]) -> None:
        """Sums a round, and sends its mean to all members."""
        try:
            start, stop = found.fragment
            mean = None
            if found.total is not None:
                mean = found.mean()
            elif any(found.weights.values()):
                names = [name_of(worker, attempt) for worker, attempt in attempts.items()]
                mean = shuffled(lambda: self._marker(generation), self._wire, key, generation, names, stop - start)
                if mean is None:
                    return
                mean = found.checked(mean)
            news = SparkSum(
                generation=generation,
                round=key,
                span=found.fragment,
                codec=found.codec.name,
                packing=found.packing,
                notes=found.notes,
                dropped=tuple(sorted(found.dropped)),
            )
            shared = None
            if mean is not None:
                self.broadcasts += 1
                shared = Shared(self._context.broadcast(mean), len(attempts))
            with self._lock:
                current = generation == self._generation and self._open
                if current:
                    self._rounds.pop(key, None)
                for worker, attempt in attempts.items():
                    if current:
                        self.put(name_of(worker, attempt), SPARK, header_of(news), shared)
                    elif shared is not None:
                        shared.drop()
        except Exception as error:
            if self._open and generation == self._generation:
                self.error = _explained(error)

    def _marker(self, generation: int) -> Any:
        """What to run a job of a generation over; None once that is over."""
        self.jobs += 1
        return self._places.everywhere() if generation == self._generation and self._open else None


class SparkHub:
    """The coordinator's end; see `thinwire.transport.ports.Hub`."""

    address = "spark"

    def __init__(self, session: Any, wire: SparkWire, workers: int) -> None:
        self.post = Post(session, wire, workers)

    @property
    def refused(self) -> int:
        return self.post.refused

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        if header["t"] == Commit.tag:
            commit = TO_WORKER.decode(header)
            attempts = {member: int(entry["attempt"]) for member, entry in commit.members.items()}
            self.post.begin(commit.generation, attempts)
        self.post.put(name_of(worker, attempt), COORDINATOR, header, None if payload is None else bytes(payload))

    def receive(self, timeout_s: float) -> list[Message]:
        if self.post.error is not None:
            raise self.post.error
        found = list[Message]()
        with contextlib.suppress(queue.Empty):
            found.append(self.post.inbox.get(timeout=timeout_s))
            while len(found) < 1024:
                found.append(self.post.inbox.get_nowait())
        return found

    def broken(self) -> list[tuple[int, int]]:
        found, self.post.gone = self.post.gone, []
        return found

    def notices(self) -> list[events.Event]:
        found = list[events.Event]()
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.post.notices.get_nowait())
        return found

    def close(self) -> None:
        self.post.close()


def _drop(letters: list[Letter]) -> None:
    for letter in letters:
        if isinstance(letter.payload, Shared):
            letter.payload.drop()


def _explained(error: BaseException) -> BaseException:
    """Spark's own errors without the JVM's stack, and with what to look at."""
    if isinstance(error, ThinwireError):
        return error
    lines = [line for line in str(error).splitlines() if not line.lstrip().startswith(("at ", "... "))]
    return WorkerError("Spark's jobs that visit the workers fail: " + " ".join(lines[:6])[:1500])
