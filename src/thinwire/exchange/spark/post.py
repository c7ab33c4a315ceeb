"""The driver's end: short Spark jobs that carry letters, sum contributions, and bring means."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from thinwire.engine.ports import COORDINATOR, Header, Message
from thinwire.errors import ThinwireError, TimedOutError, WorkerError
from thinwire.exchange.spark.link import Letter, SparkWire, name_of
from thinwire.exchange.spark.tasks import MAIL, PART, carry_mail, read_parts, sum_parts

SPARK = -2
"""Who brings means and news of rounds, among senders."""
IDLE_S, SLOW_S, PATIENCE_S = 0.1, 2.0, 90.0
UNSEEN_S, FORGET_S = 3.0, 60.0
LONG_BYTES = 256 << 10
SLICE_BYTES = 8 << 20
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
                self.broadcast.destroy()


@dataclass
class _Bag:
    """Letters to one agent that it has not been seen to have, and the last one that came from it."""

    letters: list[Letter] = field(default_factory=list)
    number: int = 0
    ack: int = 0
    seen_at: float = field(default_factory=time.monotonic)


@dataclass
class _Round:
    """Who has launched a round."""

    fragment: tuple[int, int]
    weights: dict[int, float] = field(default_factory=dict)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)


class Post:
    """Carries everything between the coordinator and the agents of one run."""

    def __init__(self, session: Any, wire: SparkWire, workers: int) -> None:
        self._session, self._context, self._wire, self._workers = session, session.sparkContext, wire, workers
        self._tag = f"thinwire-post-{wire.run}"
        self.gone: list[tuple[int, int]] = []
        """Agents that have ended, by worker and attempt, for the hub to tell."""
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._bags: dict[str, _Bag] = {}
        self._lock = threading.RLock()
        self._generation = 0
        self._attempts: dict[int, int] = {}
        self._rounds: dict[str, _Round] = {}
        self._marker: Any = None
        self._placed, self._placed_at, self._marking = "", 0.0, threading.Lock()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "spark-rounds", initializer=self._name_jobs)
        self._open = True
        self.jobs = self.broadcasts = 0
        self._thread = threading.Thread(target=self._run, name="spark-post", daemon=True)
        self._thread.start()

    def _name_jobs(self) -> None:
        """Jobs of this thread are told apart in Spark's pages, and can be cancelled."""
        self._context.setJobGroup(self._tag, "thinwire: visits to workers", interruptOnCancel=True)
        self._context.addJobTag(self._tag)

    def put(self, name: str, sender: int, header: Header, payload: Any = None) -> None:
        """A letter for an agent; a long one travels as a broadcast, which a closure would never let go of."""
        if isinstance(payload, bytes) and len(payload) > LONG_BYTES:
            payload = Shared(self._context.broadcast(payload), 1)
        with self._lock:
            bag = self._bags.setdefault(name, _Bag())
            bag.number += 1
            bag.letters.append(Letter(bag.number, sender, header, payload))

    def begin(self, generation: int, attempts: dict[int, int]) -> None:
        """A generation is about to begin: rounds of earlier ones are over."""
        with self._lock:
            if generation != self._generation:
                self._generation, self._attempts, self._rounds = generation, attempts, {}

    def close(self) -> None:
        """Ends what runs, and lets go of what Spark holds for it."""
        self._open = False
        with contextlib.suppress(Exception):  # here and below: the session may have ended
            self._context.cancelJobsWithTag(self._tag)
        self._thread.join(20.0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock, contextlib.suppress(Exception):
            for bag in self._bags.values():
                self._drop(bag.letters)
            self._bags = {}
            if self._marker is not None:
                self._marker.unpersist()

    # -- letters ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failing_since: float | None = None
        self._name_jobs()
        while self._open:
            try:
                moved = self._carry()
                failing_since = None
            except Exception as error:  # an executor died under the job, or the session has ended
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > PATIENCE_S:
                    self.error = _explained(error)
                    return
                moved = False
            if not moved:
                time.sleep(IDLE_S)

    def _carry(self) -> bool:
        """One job that visits every box; returns whether a letter moved."""
        frames: list[Any] = []
        with self._lock:
            self._forget_the_dead()
            bags: dict[str, Any] = {}
            for name, bag in self._bags.items():
                letters = []
                for letter in bag.letters:
                    frame = None
                    if letter.payload is not None:
                        frame = len(frames)
                        frames.append(
                            letter.payload.broadcast if isinstance(letter.payload, Shared) else letter.payload
                        )
                    letters.append((letter.number, letter.other, letter.header, frame))
                bags[name] = {"letters": letters, "ack": bag.ack}
        job = uuid.uuid4().hex
        found = self._collect(functools.partial(carry_mail, self._wire, job, bags, frames), MAIL)
        moved = False
        for row in found:
            moved |= self._came(row["name"], json.loads(row["header"]), bytes(row["frames"]))
        self._look_around()
        return moved or any(letter[2]["t"] != "pong" for bag in bags.values() for letter in bag["letters"])

    def _forget_the_dead(self) -> None:
        """Letters to those who have not been seen for long, and are not members, are nobody's."""
        members, now = {name_of(w, a) for w, a in self._attempts.items()}, time.monotonic()
        for name, bag in self._bags.items():
            if name not in members and now - bag.seen_at > FORGET_S:
                self._drop(bag.letters)
                bag.letters = []

    def _look_around(self) -> None:
        """Where not all agents have been seen of late, tasks are sent to other executors."""
        now = time.monotonic()
        seen = sum(now - bag.seen_at < UNSEEN_S for bag in self._bags.values())
        if seen < self._workers and now - self._placed_at > 1.0:
            with self._marking:
                self._placed = ""

    def _came(self, name: str, header: dict[str, Any], data: bytes) -> bool:
        frames, start = [], 0
        for size in header["sizes"]:
            frames.append(memoryview(data)[start : start + size])
            start += size
        with self._lock:
            if header.get("gone"):
                worker, _, attempt = name.partition(".")
                self.gone.append((int(worker), int(attempt)))
                return False
            bag = self._bags.setdefault(name, _Bag())
            bag.seen_at = time.monotonic()
            had = [letter for letter in bag.letters if letter.number <= int(header["seen"])]
            bag.letters = [letter for letter in bag.letters if letter.number > int(header["seen"])]
            self._drop(had)
            new = [letter for letter in header["letters"] if int(letter[0]) > bag.ack]
            for number, to, inner, frame in new:
                bag.ack = int(number)
                self._route(name, int(to), inner, None if frame is None else frames[int(frame)])
        return any(letter[2]["t"] != "beat" for letter in new)

    def _route(self, name: str, to: int, header: Header, payload: memoryview | None) -> None:
        worker = int(name.partition(".")[0])
        if to != COORDINATOR:
            if to in self._attempts:
                self.put(name_of(to, self._attempts[to]), worker, header, None if payload is None else bytes(payload))
        elif header["t"] == "launched":
            self._launched(worker, header)
        else:
            self.inbox.put(Message(worker, header, payload))

    def _drop(self, letters: list[Letter]) -> None:
        for letter in letters:
            if isinstance(letter.payload, Shared):
                letter.payload.drop()

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _launched(self, worker: int, header: Header) -> None:
        if header["g"] != self._generation or self._attempts.get(worker) != header["a"]:
            return
        key, fragment = str(header["r"]), (int(header["s"][0]), int(header["s"][1]))
        if key not in self._rounds:
            self._rounds[key] = _Round(fragment)
            news = {"t": "open", "g": self._generation, "r": key, "s": list(fragment)}
            for other, attempt in self._attempts.items():
                if other != worker:
                    self.put(name_of(other, attempt), SPARK, dict(news))
        found = self._rounds[key]
        found.weights[worker], found.notes[worker] = float(header["w"]), dict(header["n"])
        if set(found.weights) == set(self._attempts):
            del self._rounds[key]
            self._pool.submit(self._exchange, key, found, self._generation, dict(self._attempts))

    def _exchange(self, key: str, found: _Round, generation: int, attempts: dict[int, int]) -> None:
        """Sums a round, and sends its mean to all members."""
        try:
            start, stop = found.fragment
            mean = None
            if any(found.weights.values()):
                mean = self._reduce(key, generation, attempts, stop - start)
                if mean is None:
                    return
            header: Header = {"t": "sum", "g": generation, "r": key, "s": [start, stop]}
            header["n"] = {str(worker): note for worker, note in found.notes.items()}
            shared = None
            if mean is not None:
                self.broadcasts += 1
                shared = Shared(self._context.broadcast(mean), len(attempts))
            with self._lock:
                current = generation == self._generation and self._open
                for worker, attempt in attempts.items():
                    if current:
                        self.put(name_of(worker, attempt), SPARK, dict(header), shared)
                    elif shared is not None:
                        shared.drop()
        except Exception as error:
            if self._open:
                self.error = _explained(error)

    def _reduce(self, key: str, generation: int, attempts: dict[int, int], size: int) -> bytes | None:
        """The mean of all contributions; None where the generation has ended meanwhile."""
        names = [name_of(worker, attempt) for worker, attempt in attempts.items()]
        slices = max(1, -(-4 * size // SLICE_BYTES))
        deadline, failed = time.monotonic() + PATIENCE_S, "no task came there"
        while generation == self._generation and self._open:
            job = uuid.uuid4().hex
            task = functools.partial(read_parts, self._wire, job, key, generation, names, size, slices)
            parts = self._machines().mapInArrow(task, PART).repartition(slices, "slice").mapInArrow(sum_parts, PART)
            self.jobs += 1
            try:
                rows = sorted(parts.collect(), key=lambda row: int(row["slice"]))
            except Exception as error:  # an executor died under it
                rows, failed = [], str(error)[:300]
            whole = [set(json.loads(row["who"])) == set(names) for row in rows]  # a task that ran again found nothing
            if len(whole) == slices and all(whole):
                return b"".join(bytes(row["data"]) for row in rows)
            if time.monotonic() > deadline:
                raise TimedOutError(
                    f"round {key} was not read from all of {sorted(names)} within {PATIENCE_S:.0f} s ({failed}); "
                    "exchange='spark' needs a slot on each machine beside those of its workers"
                )
            time.sleep(IDLE_S)
        return None

    # -- jobs -------------------------------------------------------------------------------------------------------

    def _collect(self, task: Callable[..., Any], schema: str) -> list[Any]:
        self.jobs += 1
        frame, began = self._machines(), time.monotonic()
        found = list(frame.mapInArrow(task, schema).collect())
        if time.monotonic() - began > SLOW_S:  # it may have waited for a slot where its rows lie, with others free
            with self._marking:
                self._placed = ""
        return found

    def _machines(self) -> Any:
        """A frame with a partition for every executor: where its rows lie, tasks over it run.

        It is made anew when executors have come or gone, or an agent is not seen, and then lies where slots are free.
        """
        context = self._context._jsc.sc()
        executors = str(context.getExecutorIds())
        with self._marking:
            if self._marker is None or self._placed != executors:
                if self._marker is not None:
                    self._marker.unpersist()
                count = max(1, int(context.getExecutorIds().size()))
                first = secrets.randbelow(1 << 40)  # a plan that no other is taken for
                self._marker = self._session.range(first, first + count, 1, count).persist()
                self._marker.count()
                self._placed, self._placed_at = executors, time.monotonic()
            return self._marker


class SparkHub:
    """The coordinator's end; see `thinwire.engine.ports.Hub`."""

    address = "spark"

    def __init__(self, session: Any, wire: SparkWire, workers: int) -> None:
        self.post = Post(session, wire, workers)
        self.refused = 0

    def send(self, worker: int, attempt: int, header: Header, payload: memoryview | None = None) -> None:
        if header["t"] == "commit":
            attempts = {int(member): int(entry["attempt"]) for member, entry in header["members"].items()}
            self.post.begin(int(header["g"]), attempts)
        self.post.put(name_of(worker, attempt), COORDINATOR, header, None if payload is None else bytes(payload))

    def receive(self, timeout_s: float) -> list[Message]:
        if self.post.error is not None:
            raise self.post.error
        found: list[Message] = []
        try:
            found.append(self.post.inbox.get(timeout=timeout_s))
            while len(found) < 1024:
                found.append(self.post.inbox.get_nowait())
        except queue.Empty:
            pass
        return found

    def broken(self) -> list[tuple[int, int]]:
        found, self.post.gone = self.post.gone, []
        return found

    def close(self) -> None:
        self.post.close()


def _explained(error: BaseException) -> BaseException:
    """Spark's own errors without the JVM's stack, and with what to look at."""
    if isinstance(error, ThinwireError):
        return error
    lines = [line for line in str(error).splitlines() if not line.lstrip().startswith(("at ", "... "))]
    return WorkerError("Spark's jobs that visit the workers fail: " + " ".join(lines[:6])[:1500])
