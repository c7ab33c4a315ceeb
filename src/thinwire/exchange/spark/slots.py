"""Task slots on the machines of a Spark cluster: one on each is to be left for the jobs that visit agents there.

Spark starts an agent wherever a slot is free. When agents take all slots of a machine no visit can run there, and none
of them is heard. Spark says what runs where; an agent too many is killed, which Spark does not count as a failure, and
starts again on a machine with room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from thinwire import events
from thinwire.errors import ConfigError

_log = logging.getLogger("thinwire.spark")
SURPLUS_S, BLOCKED_S = 2.0, 60.0
"""How long agents of a machine without a free slot are not heard before one of them is moved: where agents alone fill
it, and where tasks of other jobs do."""
TELL_S, REFUSE_S = 10.0, 8.0
PAUSE_S, AGAIN_S = 12.0, 60.0
"""Between two moves from one machine: Spark may start an agent where it was before; and until one is told of again."""
BEFORE_S, HOLD_S, PATIENCE_S, QUIET_S = 0.3, 2.0, 4.0, 8.0
"""How long a task is asked for before the agent whose slot it is to take is ended, how long it keeps the slot, how long
such tasks are sent, and how long nobody looks for machines meanwhile: that takes a slot on each."""
MOST_NAMED = 4


class Agent(NamedTuple):
    """A running task that is a worker; its attempt is Spark's number of the task."""

    worker: int
    attempt: int


class Machine(NamedTuple):
    """Executors that share a machine's boxes, and what runs on them."""

    executors: tuple[str, ...]
    host: str
    slots: int
    agents: tuple[Agent, ...] = ()
    others: int = 0
    """Running tasks that are neither agents nor visits to them."""
    visits: int = 0

    @property
    def free(self) -> int:
        """Slots for visits: those with a visit are such."""
        return self.slots - len(self.agents) - self.others

    @property
    def idle(self) -> int:
        """Slots in which nothing runs."""
        return self.free - self.visits

    @property
    def room(self) -> int:
        """How many agents it can have."""
        return max(0, self.slots - 1)

    @property
    def name(self) -> str:
        several = "executors" if len(self.executors) > 1 else "executor"
        return f"{several} {', '.join(self.executors)} on {self.host}"


def agents_description(workers: int, run: str) -> str:
    """What Spark calls the job whose tasks are the agents of a run."""
    return f"thinwire: {workers} workers" + (f" of run {run}" if run else "")


def visits_description(run: str) -> str:
    """What Spark calls the jobs that visit agents of a run."""
    return f"thinwire: visits to workers of run {run}"


def machines(context: Any, *, workers: int = 0, run: str = "", apart: bool = False) -> list[Machine]:
    """The machines of a cluster as Spark knows them now, with what runs there.

    Args:
        context: the session's SparkContext.
        workers: how many agents the run asked for.
        run: the run's name.
        apart: whether each executor counts as a machine of its own.
    """
    scala = context._jsc.sc()  # not part of Spark's public face, as its page of executors is not
    store = scala.statusStore()
    agents, visits = dict[str, list[Agent]](), dict[str, int]()
    for stage in _each(store.activeStages()) if run else ():
        description = stage.description().get() if stage.description().isDefined() else ""
        if run not in description:
            continue
        for task in _each(store.taskList(stage.stageId(), stage.attemptId(), 1_000_000)):
            if task.status() != "RUNNING":
                continue
            if description == agents_description(workers, run):
                agents.setdefault(task.executorId(), []).append(Agent(int(task.index()), int(task.taskId())))
            else:
                visits[task.executorId()] = visits.get(task.executorId(), 0) + 1
    running = scala.taskScheduler().runningTasksByExecutors()
    found: dict[str, Machine] = {}
    for executor in sorted(_each(store.executorList(True)), key=lambda executor: str(executor.id())):
        name, host, slots = str(executor.id()), str(executor.hostPort()).rpartition(":")[0], int(executor.maxTasks())
        if slots < 1:  # the driver, which runs tasks only where Spark is embedded in it
            continue
        here = tuple(agents.get(name, ()))
        busy = int(running.get(name).get()) if running.get(name).isDefined() else 0
        visiting = visits.get(name, 0)
        others = max(0, busy - len(here) - visiting)
        beside = found.get(name if apart else host, Machine((), host, 0))
        found[name if apart else host] = Machine(
            (*beside.executors, name),
            host,
            beside.slots + slots,
            (*beside.agents, *here),
            beside.others + others,
            beside.visits + visiting,
        )
    return list(found.values())


def may_grow(context: Any) -> bool:
    """Whether Spark brings and takes executors as they are needed."""
    return str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"


def refuse_too_little_room(found: Iterable[Machine], workers: int) -> None:
    """Raises ConfigError where the agents of a run would leave no slot for visits on some machine."""
    told = too_little_room(list(found), workers)
    if told:
        raise ConfigError(told)


def too_little_room(there: list[Machine], workers: int) -> str:
    """Why a cluster has no room for the agents of a run and visits to them; empty where it has."""
    room = sum(machine.room for machine in there)
    if room >= workers:
        return ""
    named = [f"{machine.name}: {machine.slots} slot{'s' * (machine.slots != 1)}" for machine in there]
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    fewer = f"ask for at most {room} worker{'s' * (room != 1)}, " if room else ""
    who = "1 worker is" if workers == 1 else f"{workers} workers are"
    return (
        f"{who} asked for and the cluster has room for {room}: exchange='spark' needs one slot on each machine beside "
        f"those of its workers, for the jobs that visit them ({'; '.join(named[:MOST_NAMED])}{more}); {fewer}give "
        "executors more cores (spark.executor.cores), or use exchange='mesh'"
    )


class FreeSlots:
    """Sees to it that agents can be visited; its caller gives the time by calling `look`."""

    def __init__(
        self,
        see: Callable[[], list[Machine]],
        move: Callable[[Machine, int], Any],
        workers: int,
        *,
        may_grow: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        see: the machines as they are now.
        move: ends an attempt on a machine, which the cluster then starts again.
        workers: how many agents there are to be.
        may_grow: whether the cluster brings more executors by itself.
        clock: seconds.
        """
        self._see, self._move, self._workers, self._may_grow, self._clock = see, move, workers, may_grow, clock
        self._full_since: dict[tuple[str, ...], float] = {}
        self._moves: dict[tuple[str, ...], float] = {}
        """By machine, when an agent may be moved from it again."""
        self._tells: dict[tuple[str, ...], tuple[float, float]] = {}
        """By machine, when it is to be told of again, and how long to wait after that."""
        self._cluster: tuple[list[tuple[str, ...]], float] = [], 0.0
        """The machines there are, and since when."""

    def look(self, heard: Mapping[int, float], *, begun: bool) -> list[events.Event]:
        """Moves agents that fill a machine; gives back what there is to tell.

        Args:
            heard: when attempts were heard last.
            begun: whether training has begun.

        Raises:
            ConfigError: The cluster has no room for the run's agents and the slots in which they are visited.
        """
        now, there = self._clock(), self._see()
        names = [machine.executors for machine in there]
        if names != self._cluster[0]:
            self._cluster = names, now
        settled = not self._may_grow and now - self._cluster[1] > REFUSE_S
        if settled and not begun and any(machine.agents for machine in there):
            refuse_too_little_room(there, self._workers)
        found = list[events.Event]()
        for machine in there:
            if machine.free > 0 or not machine.agents:
                self._forget(machine.executors)
                continue
            last = max(heard.get(agent.attempt, 0.0) for agent in machine.agents)
            since = self._full_since[machine.executors] = max(self._full_since.get(machine.executors, now), last)
            found += self._look_at(machine, there, heard, now, now - since)
        for gone in self._full_since.keys() - set(names):
            self._forget(gone)
        return found

    def _look_at(
        self, machine: Machine, there: list[Machine], heard: Mapping[int, float], now: float, silent_s: float
    ) -> list[events.Event]:
        """What to do and to tell about a machine without a slot for visits, whose agents are not heard."""
        patience_s = SURPLUS_S if len(machine.agents) >= machine.slots else BLOCKED_S
        elsewhere = any(m.idle > 0 and m.room > len(m.agents) for m in there if m is not machine)
        moved = None
        if silent_s >= patience_s and elsewhere and now >= self._moves.get(machine.executors, 0.0):
            moved = max(machine.agents, key=lambda agent: (agent.attempt not in heard, agent.attempt))
            self._move(machine, moved.attempt)
            self._moves[machine.executors] = now + PAUSE_S
        tell_at, wait_s = self._tells.get(machine.executors, (0.0, AGAIN_S))
        if moved is None and (silent_s < TELL_S or now < tell_at):
            return []
        self._tells[machine.executors] = now + wait_s, 2 * wait_s
        return [
            events.SlotAwaited(
                executors=machine.executors,
                host=machine.host,
                slots=machine.slots,
                workers=tuple(sorted(agent.worker for agent in machine.agents)),
                others=machine.others,
                seconds=round(silent_s, 1),
                moved=None if moved is None else moved.worker,
            )
        ]

    def _forget(self, machine: tuple[str, ...]) -> None:
        for table in (self._full_since, self._moves, self._tells):
            table.pop(machine, None)


class Mover:
    """Ends an agent, and holds its slot while Spark starts it again elsewhere.

    Spark offers the slot of an ended task to tasks that wait, and has the ended one wait again a moment later::

        this task waits for the machine's slot ─ the agent ends ─ this task takes the slot ─ the agent waits again
        ─ it is started where a slot is free ─ this task ends: the slot is for visits
    """

    def __init__(self, context: Any, begin: Callable[[], None]) -> None:
        """Args:
        context: the session's SparkContext.
        begin: names the jobs of the thread that calls it.
        """
        self._context, self._begin = context, begin
        self.quiet_until = 0.0
        """Until then no other task is to take the slot that Spark is to find elsewhere."""

    def __call__(self, machine: Machine, attempt: int) -> None:
        self.quiet_until = time.monotonic() + QUIET_S
        threading.Thread(target=self._hold, args=(machine,), name="spark-hold", daemon=True).start()
        time.sleep(BEFORE_S)
        self._context._jsc.sc().killTaskAttempt(attempt, True, "no job can visit it there")

    def _hold(self, machine: Machine) -> None:
        """Sends a task there, and another where the first one found no slot in time: after `spark.locality.wait` Spark
        runs it anywhere.
        """
        until = time.monotonic() + PATIENCE_S
        try:
            self._begin()
            there = _lying_on(self._context, machine)
            while time.monotonic() < until:
                there.mapPartitions(_keep).collect()
        except Exception as error:  # the session may have ended; without this task chance decides
            _log.debug("no task could be sent to %s: %s", machine.name, error)


def _keep(rows: Iterable[Any]) -> list[Any]:
    for _ in rows:
        pass
    time.sleep(HOLD_S)
    return []


def _lying_on(context: Any, machine: Machine) -> Any:
    """An RDD of one row that would rather be computed on a machine's executors."""
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    pickling: Any = CPickleSerializer()
    jvm, there = context._jvm, [f"executor_{machine.host}_{name}" for name in machine.executors]
    tag = context.parallelize([0], 1)._jrdd.classTag()
    row = jvm.scala.Tuple2(pickling.dumps(0), jvm.PythonUtils.toSeq(there))
    rdd = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([row]), tag)
    return RDD(jvm.org.apache.spark.api.java.JavaRDD(rdd, tag), context, pickling)


def _each(rows: Any) -> list[Any]:
    """Scala's rows as a list."""
    return [rows.apply(index) for index in range(rows.size())]
