"""Virtual time: threads of which one runs at a time, and a clock that jumps to whatever happens next.

A fiber is a thread that holds the run's only baton. One that waits passes the baton on, through a queue of events in
the order of their moments, and of their making where moments are equal: the same run goes the same way each time.
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
"""Of a fiber's thread: there may be thousands."""


class KilledError(BaseException):
    """Ends a fiber wherever it waits."""


class Fiber:
    """One line of execution; see `thinwire.protocol.clock.Beside`."""

    def __init__(self, time: VirtualTime, act: Callable[[], Any], name: str, owner: object) -> None:
        self._time, self._act = time, act
        self.name, self.owner = name, owner
        self.go = threading.Lock()
        self.go.acquire()
        self.ticket = 0
        """Of the wake-up that counts: earlier ones came too late."""
        self.parked = self.killed = self.done = False
        self.error: BaseException | None = None
        self._waiting: list[Fiber] = []

    def start(self) -> None:
        """Lets it run from now on, once whoever starts it waits."""
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
        """Waits until it has ended, or so long."""
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


class VirtualTime:
    """See `thinwire.protocol.clock.Time`. Whoever makes it is its first fiber."""

    def __init__(self, takes_s: Mapping[str, float] = MappingProxyType({})) -> None:
        self._now, self._takes_s = 0.0, takes_s
        self._events: list[tuple[float, int, Fiber | None, Any]] = []
        self._numbers = itertools.count()
        self.fibers: dict[Fiber, None] = {}
        """In the order in which they began: one of addresses would not be the same each time."""
        self._main = self.current = Fiber(self, lambda: None, "driver", None)
        self._frozen: dict[object, float] = {}
        self._rested: dict[object, float] = {}
        """Seconds for which owners have been frozen, in all."""
        self._interrupted = False
        self._error: BaseException | None = None

    def now(self) -> float:
        return self._now

    wall = now

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self)

    def beside(self, act: Callable[[], None], name: str) -> Fiber:
        return self.fiber(act, name, self.current.owner)

    def fiber(self, act: Callable[[], Any], name: str, owner: object) -> Fiber:
        """One that ends, and rests, with all others of its owner."""
        return Fiber(self, act, name, owner)

    def executor(self, name: str, threads: int = 1) -> Executor:
        seconds = self._takes_s.get(name, 0.0)
        return InTurn(self, name, seconds) if seconds else AtOnce()

    # -- what happens -----------------------------------------------------------------------------------------------

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Has something done at a moment, by whoever holds the baton then; it must not wait."""
        heapq.heappush(self._events, (max(moment, self._now), next(self._numbers), None, act))

    def sleep(self, seconds: float) -> None:
        """Lets so much time pass for the fiber that calls."""
        until = self._now + seconds
        while self._now < until:
            self.park(until - self._now)

    def park(self, timeout: float | None = None) -> None:
        """Waits for a `wake`, or so long."""
        me = self.current
        if me.killed:
            raise KilledError
        me.parked = True
        if timeout is not None:
            self._push(me, self._now + timeout)
        self._pass_on(me)
        if me.killed:
            raise KilledError
        if me is self._main:
            self._look_up()

    def wake(self, fiber: Fiber) -> None:
        """Lets a fiber that waits go on, after whoever runs now; nothing happens to one that does not wait."""
        if fiber.parked:
            self._push(fiber, self._now)

    def kill(self, owner: object) -> None:
        """Ends all fibers of an owner, where they wait."""
        self._frozen.pop(owner, None)
        for fiber in list(self.fibers):
            if fiber.owner == owner and (fiber.parked or fiber is not self.current):
                fiber.killed = True
                self.wake(fiber)

    def freeze(self, owner: object, seconds: float) -> None:
        """No fiber of an owner goes on before so long has passed."""
        self._frozen[owner] = max(self._now + seconds, self._frozen.get(owner, 0.0))
        self._rested[owner] = self._rested.get(owner, 0.0) + seconds

    def work(self, seconds: float) -> None:
        """Lets so much time pass for the fiber that calls, not counting that in which it is frozen."""
        owner, begun = self.current.owner, self._now
        rested = self._rested.get(owner, 0.0)
        while self._now < (until := begun + seconds + self._rested.get(owner, 0.0) - rested):
            self.park(until - self._now)

    def interrupt(self) -> None:
        """Has the first fiber raise KeyboardInterrupt when its turn comes; may be called by a signal's handler."""
        self._interrupted = True

    def stop(self, spared: Container[object] = ()) -> None:
        """Ends every fiber but the first, which calls, and those of owners to be spared."""
        while ending := [fiber for fiber in self.fibers if fiber.owner not in spared]:  # one may start meanwhile
            for owner in dict.fromkeys(fiber.owner for fiber in ending):
                self.kill(owner)
            for fiber in ending:
                fiber.join(60.0)

    # -- the baton --------------------------------------------------------------------------------------------------

    def _push(self, fiber: Fiber, moment: float) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), fiber, fiber.ticket))

    def leave(self, me: Fiber) -> None:
        """A fiber has ended: the baton goes on without it."""
        self._next(me)

    def _pass_on(self, me: Fiber) -> None:
        if self._next(me) is not me:
            me.go.acquire()

    def _next(self, me: Fiber) -> Fiber:
        """Lets things happen until it is some fiber's turn, and hands it the baton."""
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
        """Does the next thing; the fiber whose turn it is, if it is one's."""
        if not self._events:
            self._error = TimedOutError(
                f"at {self._now:.3f} s nothing is left to happen, and {len(self.fibers)} fibers wait for ever"
            )
            return self._main
        moment, _, fiber, what = heapq.heappop(self._events)
        if fiber is None:
            self._now = moment
            try:
                what()
            except BaseException as error:  # the first fiber raises it
                self._error = error
                return self._main
            return None
        if fiber.ticket != what or fiber.done:
            return None
        thawed = self._frozen.get(fiber.owner, 0.0)
        if moment < thawed:
            self._push(fiber, thawed)
            return None
        self._now = moment
        return fiber

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
