"""The driver's end: short Spark jobs that carry letters, sum contributions, and bring means."""

from __future__ import annotations

import functools
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from thinwire.engine.ports import COORDINATOR, Header, Message
from thinwire.errors import TimedOutError
from thinwire.exchange.spark.link import Letter, SparkWire, name_of
from thinwire.exchange.spark.tasks import MAIL, PART, carry_mail, read_parts, sum_parts

SPARK = -2
"""Who brings means and news of rounds, among senders."""
IDLE_S, SLOW_S, PATIENCE_S = 0.05, 2.0, 90.0
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

    def __init__(self, session: Any, wire: SparkWire) -> None:
        self._session, self._context, self._wire = session, session.sparkContext, wire
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._bags: dict[str, _Bag] = {}
        self._lock = threading.RLock()
        self._generation = 0
        self._attempts: dict[int, int] = {}
        self._rounds: dict[str, _Round] = {}
        self._marker: Any = None
        self._placed, self._marking = "", threading.Lock()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "spark-rounds")
        self._open = True
        self.jobs = self.broadcasts = 0
        self._thread = threading.Thread(target=self._run, name="spark-post", daemon=True)
        self._thread.start()

    def put(self, name: str, sender: int, header: Header, payload: Any = None) -> None:
        """A letter for an agent."""
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
        self._open = False
        self._thread.join(10.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for bag in self._bags.values():
                self._drop(bag.letters)
            self._bags = {}

    # -- letters ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failing_since: float | None = None
        while self._open:
            try:
                moved = self._carry()
                failing_since = None
            except Exception as error:  # an executor died under the job, or the session has ended
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > PATIENCE_S:
                    self.error = error
                    return
                moved = False
            if not moved:
                time.sleep(IDLE_S)

    def _carry(self) -> bool:
        """One job that visits every box; returns whether a letter moved."""
        frames: list[Any] = []
        with self._lock:
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
        return moved or any(bag["letters"] for bag in bags.values())

    def _came(self, name: str, header: dict[str, Any], data: bytes) -> bool:
        frames, start = [], 0
        for size in header["sizes"]:
            frames.append(memoryview(data)[start : start + size])
            start += size
        with self._lock:
            bag = self._bags.setdefault(name, _Bag())
            bag.seen_at = time.monotonic()
            had = [letter for letter in bag.letters if letter.number <= int(header["seen"])]
            bag.letters = [letter for letter in bag.letters if letter.number > int(header["seen"])]
            self._drop(had)
            new = [letter for letter in header["letters"] if int(letter[0]) > bag.ack]
            for number, to, inner, frame in new:
                bag.ack = int(number)
                self._route(name, int(to), inner, None if frame is None else frames[int(frame)])
        return bool(new)

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
            with self._lock:
                if generation != self._generation:
                    return
                shared = None
                if mean is not None:
                    self.broadcasts += 1
                    shared = Shared(self._context.broadcast(mean), len(attempts))
                for worker, attempt in attempts.items():
                    self.put(name_of(worker, attempt), SPARK, dict(header), shared)
        except Exception as error:
            if self._open:
                self.error = error

    def _reduce(self, key: str, generation: int, attempts: dict[int, int], size: int) -> bytes | None:
        """The mean of all contributions; None where the generation has ended meanwhile."""
        names = [name_of(worker, attempt) for worker, attempt in attempts.items()]
        slices = max(1, min(len(names), 4 * size // SLICE_BYTES))
        deadline, heard = time.monotonic() + PATIENCE_S, set[str]()
        while generation == self._generation and self._open:
            job = uuid.uuid4().hex
            task = functools.partial(read_parts, self._wire, job, key, generation, names, size, slices)
            parts = self._machines().mapInArrow(task, PART).repartition(slices, "slice").mapInArrow(sum_parts, PART)
            self.jobs += 1
            rows = sorted(parts.collect(), key=lambda row: int(row["slice"]))
            heard = {name for row in rows for name in json.loads(row["who"])}
            if heard == set(names):
                return b"".join(bytes(row["data"]) for row in rows)
            if time.monotonic() > deadline:
                missing = sorted(set(names) - heard)
                raise TimedOutError(
                    f"no task came to the machines of workers {missing} within {PATIENCE_S:.0f} s; "
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
        """A frame with a partition on every machine: where its rows lie, tasks over it run.

        It is made anew when executors have come or gone, and then lies where slots are free.
        """
        context = self._context._jsc.sc()
        executors = str(context.getExecutorIds())
        with self._marking:
            if self._marker is None or self._placed != executors:
                hosts = {info.host() for info in context.statusTracker().getExecutorInfos()}
                if self._marker is not None:
                    self._marker.unpersist()
                self._marker = self._session.range(0, len(hosts), 1, max(1, len(hosts))).persist()
                self._marker.count()
                self._placed = executors
            return self._marker


class SparkHub:
    """The coordinator's end; see `thinwire.engine.ports.Hub`."""

    address = "spark"

    def __init__(self, session: Any, wire: SparkWire) -> None:
        self.post = Post(session, wire)
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
        return []

    def close(self) -> None:
        self.post.close()
