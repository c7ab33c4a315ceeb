"""Virtual time: threads of which one runs at a time, and a clock that jumps to the next event.

A fiber is a thread, and only the fiber whose turn it is runs. A fiber that waits passes the turn on, through a queue of
events in the order of their times, and of their creation for equal times. Runs are therefore deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any

from thinwire.cluster.simulated.stores import AtOnce, InTurn
from thinwire.errors import TimedOutError

STACK_BYTES = 1 << 20
"""Stack size of a fiber's thread; a run may have thousands."""


class KilledError(BaseException):
    """Ends a fiber where it waits."""


class Fiber:
    """A cooperatively scheduled thread; see `thinwire.protocol.clock.Beside`."""

    def __init__(self, time: VirtualTime, act: Callable[[], Any], name: str, owner: object) -> None:
        self._time, self._act = time, act
        self.name, self.owner = name, owner
        self.go = threading.Lock()
        self.go.acquire()
        self.ticket = 0
        """Number of the present wake-up; events with other numbers are obsolete."""
        self.parked = self.killed = self.done = False
        self.error: BaseException | None = None
        self._waiting: list[Fiber] = []

    def start(self) -> None:
        """Schedules the fiber, which runs once the caller waits."""
        size = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name=self.name, daemon=True).start()
        finally:
            threading.stack_size(size)
        self.parked = True
        self._time.fibers[self] = None
        self._time.wake(self)

    def is_alive(self) -> bool:
        return self in self._time.fibers

    def join(self, timeout: float) -> None:
        """Waits until the fiber has ended, or for `timeout` seconds."""
        if self.is_alive():
            self._waiting.append(self._time.current)
            self._time.park(timeout)

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.killed:
                self._act()
        except KilledError:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._time.fibers.pop(self, None)
        for fiber in self._waiting:
            self._time.wake(fiber)
        self._time.leave(self)


class Agenda:
    """The clock and the queue of events: functions to call, and fibers to continue, in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Fiber | None, Any]] = []
        self._numbers = itertools.count()
        self._frozen: dict[object, float] = {}
        """By frozen owner, the time at which its fibers may continue."""
        self._rested: dict[object, float] = {}

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Calls a function at a moment, in the fiber whose turn it is then; the function must not wait."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._numbers), None, act))

    def go_on(self, fiber: Fiber, moment: float) -> None:
        """Continues a fiber at a moment, unless it continues earlier."""
        heapq.heappush(self._events, (moment, next(self._numbers), fiber, fiber.ticket))

    def freeze(self, owner: object, seconds: float) -> None:
        """Lets no fiber of an owner continue for a time."""
        self._frozen[owner] = max(self.now + seconds, self._frozen.get(owner, 0.0))
        self._rested[owner] = self._rested.get(owner, 0.0) + seconds

    def thaw(self, owner: object) -> None:
        """Lets the fibers of an owner continue."""
        self._frozen.pop(owner, None)

    def rested_s(self, owner: object) -> float:
        """Total seconds for which an owner has been frozen."""
        return self._rested.get(owner, 0.0)

    def __bool__(self) -> bool:
        """Whether events are left."""
        return bool(self._events)

    def advance(self) -> Fiber | None:
        """Advances the clock to the next event, and calls its function; returns the fiber whose turn it is, if any."""
        moment, _, fiber, what = heapq.heappop(self._events)
        if fiber is None:
            self.now = moment
            what()
            return None
        if fiber.ticket != what or fiber.done:
            return None
        thawed = self._frozen.get(fiber.owner, 0.0)
        if moment < thawed:
            self.go_on(fiber, thawed)
            return None
        self.now = moment
        return fiber


class VirtualTime:
    """See `thinwire.protocol.clock.Time`. The thread that creates it is the first fiber."""

    def __init__(self, takes_s: Mapping[str, float] = MappingProxyType({})) -> None:
        self._agenda, self._takes_s = Agenda(), takes_s
        self.at, self.freeze = self._agenda.at, self._agenda.freeze
        self.fibers: dict[Fiber, None] = {}
        """In the order of their start, which is deterministic; a set ordered by address would not be."""
        self._main = self.current = Fiber(self, lambda: None, "driver", None)
        self._interrupted = False
        self._error: BaseException | None = None

    def now(self) -> float:
        return self._agenda.now

    wall = now

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self)

    def beside(self, act: Callable[[], None], name: str) -> Fiber:
        return self.fiber(act, name, self.current.owner)

    def fiber(self, act: Callable[[], Any], name: str, owner: object) -> Fiber:
        """A fiber that ends and freezes together with all others of its owner."""
        return Fiber(self, act, name, owner)

    def executor(self, name: str, threads: int = 1) -> Executor:
        seconds = self._takes_s.get(name, 0.0)
        return InTurn(self, name, seconds) if seconds else AtOnce()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Lets time pass for the calling fiber."""
        until = self.now() + seconds
        while self.now() < until:
            self.park(until - self.now())

    def park(self, timeout: float | None = None) -> None:
        """Waits for a `wake`, or until the timeout."""
        me = self.current
        if me.killed:
            raise KilledError
        me.parked = True
        if timeout is not None:
            self._agenda.go_on(me, self.now() + timeout)
        self._pass_on(me)
        if me.killed:
            raise KilledError
        if me is self._main:
            self._look_up()

    def wake(self, fiber: Fiber) -> None:
        """Continues a waiting fiber after the present one; does nothing if the fiber does not wait."""
        if fiber.parked:
            self._agenda.go_on(fiber, self.now())

    def kill(self, owner: object) -> None:
        """Ends all fibers of an owner where they wait."""
        self._agenda.thaw(owner)
        for fiber in list(self.fibers):
            if fiber.owner == owner and (fiber.parked or fiber is not self.current):
                fiber.killed = True
                self.wake(fiber)

    def work(self, seconds: float) -> None:
        """Lets time pass for the calling fiber, excluding time in which it is frozen."""
        owner, begun, agenda = self.current.owner, self.now(), self._agenda
        rested = agenda.rested_s(owner)
        while agenda.now < (until := begun + seconds + agenda.rested_s(owner) - rested):
            self.park(until - agenda.now)

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the first fiber at its next turn; may be called by a signal handler."""
        self._interrupted = True

    def stop(self, spared: Container[object] = ()) -> None:
        """Ends all fibers except the first one, which calls this, and those of owners in `spared`."""
        while ending := [fiber for fiber in self.fibers if fiber.owner not in spared]:  # a fiber may start meanwhile
            for owner in dict.fromkeys(fiber.owner for fiber in ending):
                self.kill(owner)
            for fiber in ending:
                fiber.join(60.0)

    # -- turns ------------------------------------------------------------------------------------------------------

    def leave(self, me: Fiber) -> None:
        """Passes the turn on from a fiber that has ended."""
        self._next(me)

    def _pass_on(self, me: Fiber) -> None:
        if self._next(me) is not me:
            me.go.acquire()

    def _next(self, me: Fiber) -> Fiber:
        """Processes events until a fiber's turn comes, and passes the turn to it."""
        while True:
            fiber = self._due()
            if fiber is None:
                continue
            fiber.parked = False
            fiber.ticket += 1
            self.current = fiber
            if fiber is not me:
                fiber.go.release()
            return fiber

    def _due(self) -> Fiber | None:
        """Processes the next event; returns the fiber whose turn it is, if any."""
        if not self._agenda:
            self._error = TimedOutError(
                f"at {self.now():.3f} s no event is left, and {len(self.fibers)} fibers wait forever"
            )
            return self._main
        try:
            return self._agenda.advance()
        except BaseException as error:  # the first fiber raises it
            self._error = error
            return self._main

    def _look_up(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt


class VirtualQueue:
    """See `thinwire.protocol.clock.Queue`."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: deque[Any] = deque()
        self._reader: Fiber | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._time.wake(self._reader)
            self._reader = None

    def get(self, *, timeout: float) -> Any:
        if not self._items:
            self._reader = self._time.current
            self._time.park(timeout)
            self._reader = None
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
